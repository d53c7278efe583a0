"""Stable Diffusion 1: UNet2DConditionModel, StableDiffusionPipeline and its single files."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle, ldm, ldm_clip


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(sample=x, timestep=t, encoder_hidden_states=told["hidden_1"], return_dict=False)[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    hidden, _ = pipe.encode_prompt(captions, "cpu", 1, False)
    return {"hidden_1": hidden}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    return {"prompt": PROMPT, "negative_prompt": NEGATIVE if negative else None, "guidance_scale": scale}


ORACLE = Oracle(
    forward,
    prompts,
    whole={
        "unet": ldm("convert_ldm_unet_checkpoint"),
        "vae": ldm("convert_ldm_vae_checkpoint"),
        "text_encoder": ldm_clip,
    },
    drawn=Drawn(options, kinds=({}, {"model": {"clip_skip": 2}})),
)
