"""What the launchers under test/ and `difftrain launch` do: packages, flags, machines, ranks.

The way of a launch:
 1. environment.py  sees to the packages; it runs before any of them is there, so it imports only what lies beside it
 2. main.py         reads the launcher's flags (flags.py) and what a scheduler has set (schedulers.py)
 3. recipes.py, light.py, text_to_image.py   the words of a recipe, or its demo where nothing is named
 4. machines.py     which processes run where, and torchrun's words for it
 5. occupant.py     what is in the output folder already; claim.py one builder at a time
 6. workers.py      waits for the other machines (rendezvous.py), starts torchrun and ends as the ranks end
"""
