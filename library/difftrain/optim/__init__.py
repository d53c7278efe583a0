"""Optimizers and schedules, by name."""

from difftrain.optim.builders import announce, estimate, page_again
from difftrain.optim.registry import faults, inner, make_optimizer
from difftrain.optim.schedule import factor_of, make_schedule
from difftrain.optim.schedule_free import averages

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
