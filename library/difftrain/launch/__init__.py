"""What the launchers under test/ do: packages, flags, machines, ranks.

environment.py sees to the packages and runs before any of them is there, so it imports nothing but what lies beside it;
main.py reads the flags and starts workers.py, which starts torchrun and ends as the ranks end.
"""
