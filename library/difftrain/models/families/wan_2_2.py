"""Wan 2.2, text to video (Alibaba 2025): of 27 billion parameters half run at a time, one expert for times of much noise,
one for little.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from difftrain.models.facts import Expert, FamilyOption, Shift
from difftrain.models.families.wan import Wan

EXPERT = FamilyOption("model.expert", "which of the two experts is trained")


def experts(boundary: float) -> Mapping[str, Expert]:
    """Say where the experts lie, and which times are theirs."""
    return {"high": Expert("transformer", boundary, 1.0), "low": Expert("transformer_2", 0.0, boundary)}


class Wan22(Wan):
    """What differs from Wan 2.1: two experts."""

    name = "wan_2_2"
    modelspec = "wan-2.2-t2v"
    options = (EXPERT,)
    experts = experts(0.875)
    shift = Shift(3.0, walks=False)
    index: Mapping[str, Any] = MappingProxyType({"boundary_ratio": 0.875})
