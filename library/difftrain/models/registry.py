"""Which families there are: one line each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from difftrain.contracts import ConfigFault, Family, Fault

if TYPE_CHECKING:
    from difftrain.config import TrainConfig

FAMILIES = {
    "sdxl": "difftrain.models.sdxl.family:SDXLFamily",
    "sd3": "difftrain.models.sd3.family:SD3Family",
}


def make_family(cfg: TrainConfig) -> Family:
    """Make the family that a configuration names. Raises ConfigFault for an unknown one."""
    target = FAMILIES.get(cfg.model.family)
    if target is None:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigFault([Fault("[model] family", f"there is no family {cfg.model.family!r}", f"one of: {known}")])
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)(cfg)
