"""The parameter group of the joint transformer, and of what is trained beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from difftrain.config.rates import part_rates
from difftrain.contracts import Group

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config import TrainConfig

PART = "transformer"


def param_groups(root: nn.Module, cfg: TrainConfig) -> list[Group]:
    """Group all that is trained, under the names that root gives it: one rate for everything."""
    named = [(name, each) for name, each in root.named_parameters() if each.requires_grad]
    return [Group(PART, named, part_rates(cfg)[PART])]
