"""Process groups and agreement between ranks.

1. launch.py       the launch environment: torchrun's variables, checked
2. ranks.py        a device group for tensors, a CPU group for decisions
   rounds.py       where a launcher may start ranks again: a meeting under a name that no earlier one had
3. loopback.py     ports that only this machine reaches, where all ranks are on it
4. heartbeats.py   heartbeats, so that whoever waits in vain can name the rank that is silent
5. collective.py   work that one process does for the others, with its errors raised on all
6. groups.py       ranks that have the parts of one model; partition.py which blocks each stage of a pipeline has
"""
