"""Wan 2.2, image to video: as Wan 2.1 without an image encoder; one expert draws at all times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from family_oracles import wan_i2v
from family_oracles.wan_2_2 import alone
from oracle import Conditions


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    both = torch.cat([x, told["frames"]], dim=1)
    return net(hidden_states=both, timestep=t, encoder_hidden_states=told["tokens"], return_dict=False)[0]


assert wan_i2v.ORACLE.drawn is not None
ORACLE = replace(
    wan_i2v.ORACLE,
    forward=forward,
    converter="",
    released={},
    drawn=replace(wan_i2v.ORACLE.drawn, mended=alone),
)
