"""Optimizers and schedules, by name."""

from difftrain.optim.check import faults
from difftrain.optim.registry import inner, make_optimizer
from difftrain.optim.schedule import factor_of, make_schedule

__all__ = ["factor_of", "faults", "inner", "make_optimizer", "make_schedule"]
