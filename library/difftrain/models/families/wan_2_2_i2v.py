"""Wan 2.2, image to video (Alibaba 2025): two experts beside the latents of the first frame, which no image encoder sees."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from difftrain.models.facts import Agree, Shift
from difftrain.models.families.wan import Wan
from difftrain.models.families.wan_2_2 import EXPERT, experts
from difftrain.models.families.wan_i2v import WanI2V


class Wan22I2V(WanI2V):
    """What differs from Wan 2.1's: two experts, and no image encoder."""

    name = "wan_2_2_i2v"
    modelspec = "wan-2.2-i2v"
    frames_encoder = ""
    options = (EXPERT,)
    experts = experts(0.9)
    shift = Shift(3.0, walks=False)
    index: Mapping[str, Any] = MappingProxyType({"boundary_ratio": 0.9})
    agree = (
        *(row for row in WanI2V.agree if "image_encoder" not in row.why and "added_kv" not in row.where),
        Agree("transformer.image_dim", lambda s: None, "with an image encoder it is Wan 2.1's"),
    )

    infer = Wan.infer
