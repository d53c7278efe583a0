"""Qwen-Image: QwenImageTransformer2DModel and QwenImagePipeline."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Conditions, Oracle


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    from diffusers import QwenImagePipeline

    count, channels, _, height, width = x.shape
    out = net(
        hidden_states=QwenImagePipeline._pack_latents(x, count, channels, height, width),
        timestep=t / 1000,
        encoder_hidden_states=told["tokens"],
        encoder_hidden_states_mask=told.get("mask"),
        img_shapes=[[(1, height // 2, width // 2)]] * count,
        return_dict=False,
    )[0]
    return QwenImagePipeline._unpack_latents(out, 8 * height, 8 * width, 8)


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    """Ask for one caption after the other: together they are padded to the longest, and not to the length."""
    tokens, masks = [], []
    for caption in captions:
        made, _ = pipe.encode_prompt(caption, device="cpu", max_sequence_length=length)
        tokens.append(torch.nn.functional.pad(made[0], (0, 0, 0, length - made.shape[1])))
        masks.append(torch.arange(length) < made.shape[1])
    return {"tokens": torch.stack(tokens), "mask": torch.stack(masks)}


ORACLE = Oracle(forward, prompts)
