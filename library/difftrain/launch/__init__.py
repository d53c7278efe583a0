"""What the launchers under test/ and `difftrain launch` do: packages, flags, machines, ranks.

environment.py sees to the packages and runs before any of them is there, so it imports nothing but what lies beside it;
main.py reads the flags and what a scheduler has set (schedulers.py), and starts workers.py, which waits for the other
machines (rendezvous.py), starts torchrun and ends as the ranks end.
"""
