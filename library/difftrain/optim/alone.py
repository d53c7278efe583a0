"""One parameter's update by itself, for engines that update during the backward pass and keep no gradients."""

from __future__ import annotations

from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from difftrain.config import names
from difftrain.config.rates import is_named, is_schedule_free
from difftrain.config.sections import OptimizerSection


def looks_at_all(section: OptimizerSection) -> bool:
    """Say whether an update needs every gradient at once: an estimate or an average that groups share."""
    adaptive = is_named(section, names.ADAPTIVE)
    return adaptive or is_schedule_free(section) or section.schedulefree_wrapper


def step_alone(optimizer: Optimizer, group: dict[str, Any], parameter: Parameter) -> None:
    """Update one parameter of a group and nothing else; without a walk over all the others, which have no gradient.

    Not for optimizers that `looks_at_all` names: what they write into their groups would be lost.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
