"""Wan 2.1: WanTransformer3DModel, WanPipeline and the original layout."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(hidden_states=x, timestep=t, encoder_hidden_states=told["tokens"], return_dict=False)[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    return {"tokens": pipe.encode_prompt(captions, None, False, max_sequence_length=length, device="cpu")[0]}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how one frame is drawn."""
    made = {"prompt": PROMPT, "guidance_scale": scale, "max_sequence_length": 32, "num_frames": 1}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def raw(x: torch.Tensor, vae: Any) -> torch.Tensor:
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.latents_mean, vae.latents_std))
    return x * std + mean


# Wan 2.1's 14 B are diffusers' defaults
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
ORACLE = Oracle(
    forward,
    prompts,
    "convert_wan_transformer_to_diffusers",
    released={"t2v-14B": ({}, 1095), "t2v-1.3B": (SMALL, 825)},
    drawn=Drawn(options, raw=raw, t5_length=32),
)
