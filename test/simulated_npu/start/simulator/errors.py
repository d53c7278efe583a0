"""What the simulated device says no with."""


class Refused(RuntimeError):
    """Hardware would refuse this; the text names the rule and its source."""
