"""Checks of `difftrain doctor` that must know kinds of devices: installation, variables, devices, what they compute."""
