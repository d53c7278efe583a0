"""Optimizers and schedules, by name.

The way of an optimizer:
 1. registry.py     a literal line each; faults of its configuration before a device is touched
 2. arguments.py    key=value of the user, checked against what the class takes
 3. builders.py     kohya's names and defaults for optimizers of torch and of packages; making.py what builders share
 4. muon.py, generic.py, automagic.py, adamw_8bit_kahan.py, schedule_free.py   those that are built here
 5. schedule.py     the learning rate of every update
 6. state.py        the state of both by parameter name, as checkpoints have it
"""

from difftrain.optim.builders import announce, estimate, page_again
from difftrain.optim.registry import check_optimizer, faults, inner, make_optimizer
from difftrain.optim.schedule import factor_of, make_schedule
from difftrain.optim.schedule_free import averages

__all__ = [
    "announce",
    "averages",
    "check_optimizer",
    "estimate",
    "factor_of",
    "faults",
    "inner",
    "make_optimizer",
    "make_schedule",
    "page_again",
]
