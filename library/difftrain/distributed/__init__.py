"""Process groups and agreement between ranks.

1. launch.py       the launch environment: torchrun's variables, checked
2. ranks.py        a device group for tensors, a CPU group for decisions
3. collective.py   work that one process does for the others, with its errors raised on all
"""
