"""What is wrong with an optimizer section, found before any device is touched."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from difftrain.config.schema.rates import is_named
from difftrain.config.schema.sections import OptimizerSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, Group
from difftrain.optim.registry import make_optimizer
from difftrain.optim.schedule import make_schedule


def faults(section: OptimizerSection, total_steps: int = 1000) -> list[Fault]:
    """Return every fault of the optimizer's and the schedule's names and arguments, by making both for one number."""
    group = Group("probe", [("probe", torch.nn.Parameter(torch.zeros(1)))], section.learning_rate or 1.0)
    found: list[Fault] = []
    optimizer: Optimizer = torch.optim.SGD([group.named_params[0][1]], lr=group.lr)
    try:
        optimizer = make_optimizer(section, [group], trial=False)
    except ConfigFault as fault:
        found += fault.faults
    try:
        make_schedule(section, optimizer, total_steps)
    except ConfigFault as fault:
        found += fault.faults
    if is_named(section, ("DAdaptSGD",)) and section.learning_rate and not optimizer.param_groups[0]["lr"]:
        what = "DAdaptSGD divides by the first rate, which is 0 with this warm-up"
        found.append(Fault(option("optimizer.warmup_steps"), what, "no warm-up, or another optimizer"))
    return found
