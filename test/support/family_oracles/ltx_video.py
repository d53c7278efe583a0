"""LTX-Video: LTXVideoTransformer3DModel, LTXPipeline and the original layout."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle


def pack(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    mask = told.get("mask")
    out = net(
        hidden_states=pack(x),
        encoder_hidden_states=told["tokens"],
        timestep=t,
        encoder_attention_mask=None if mask is None else mask.long(),
        num_frames=x.shape[2],
        height=x.shape[3],
        width=x.shape[4],
        rope_interpolation_scale=(8 / 25, 32, 32),
        return_dict=False,
    )[0]
    return out.transpose(1, 2).unflatten(2, x.shape[2:])


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    tokens, mask, *_ = pipe.encode_prompt(captions, None, False, max_sequence_length=length, device="cpu")
    return {"tokens": tokens, "mask": mask.bool()}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how nine frames are drawn, two of latents."""
    made = {"prompt": PROMPT, "guidance_scale": scale, "max_sequence_length": 32, "num_frames": 9}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def unpack(x: torch.Tensor, size_hw: tuple[int, int]) -> torch.Tensor:
    return x.transpose(1, 2).unflatten(2, (2, size_hw[0] // 32, size_hw[1] // 32))


def pixels(pipe: Any, x: torch.Tensor) -> torch.Tensor:
    """Decode as the pipeline does: the VAE's weights say how latents are scaled."""
    vae = pipe.vae
    raw = pipe._denormalize_latents(x, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    return vae.decode(raw).sample


# 2 B are diffusers' defaults
LARGE = {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48}
ORACLE = Oracle(
    forward,
    prompts,
    "convert_ltx_transformer_checkpoint_to_diffusers",
    released={"2B": ({}, 715), "13B": (LARGE, 1215)},
    drawn=Drawn(options, pack=pack, unpack=unpack, pixels=pixels, t5_length=32, frames=9),
    frames=9,
    steps=2,
)
