"""What is configured: a file a group of sections, names that are known, and how values become sections."""
