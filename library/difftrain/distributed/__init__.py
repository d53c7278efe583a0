"""Process groups, the CPU control group, agreement between ranks, the launch environment."""
