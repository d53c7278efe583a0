"""Stable Diffusion 2: as Stable Diffusion 1, with OpenCLIP's encoder in its single files."""

from __future__ import annotations

from dataclasses import replace

from family_oracles import sd1
from oracle import Drawn, open_clip_of_24

assert sd1.ORACLE.drawn is not None
ORACLE = replace(
    sd1.ORACLE,
    whole={**sd1.ORACLE.whole, "text_encoder": open_clip_of_24},
    drawn=Drawn(
        sd1.options,
        kinds=({"model": {"prediction_type": "v_prediction"}}, {"model": {"prediction_type": "epsilon"}}),
    ),
)
