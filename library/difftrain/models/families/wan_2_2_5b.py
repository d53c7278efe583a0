"""Wan 2.2 5B (Alibaba 2025): Wan over stronger compression, whose tokens each have a time: so clips go on from a first frame."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from difftrain.models.facts import FamilyOption, Shift
from difftrain.models.families.wan import Wan


class Wan22Small(Wan):
    """What differs from Wan 2.1: its VAE, and clips that go on from a first frame by its tokens' time."""

    name = "wan_2_2_5b"
    modelspec = "wan-2.2-ti2v-5b"
    options = (FamilyOption("model.first_frame_conditioning_p", "how often a clip's first frame is given, not learnt"),)
    shift = Shift(5.0, walks=False)
    index: Mapping[str, Any] = MappingProxyType({"expand_timesteps": True})
