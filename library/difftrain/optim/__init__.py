"""Optimizers and schedules, by name."""

from difftrain.optim.adaptive import estimate
from difftrain.optim.check import faults
from difftrain.optim.eight_bit import page_again
from difftrain.optim.registry import inner, make_optimizer
from difftrain.optim.schedule import factor_of, make_schedule
from difftrain.optim.schedule_free import averages
from difftrain.optim.torchs import announce

__all__ = [
    "announce",
    "averages",
    "estimate",
    "factor_of",
    "faults",
    "inner",
    "make_optimizer",
    "make_schedule",
    "page_again",
]
