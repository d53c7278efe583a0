"""Qwen-Image: QwenImageTransformer2DModel and QwenImagePipeline."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle

from difftrain.models import passes


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


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    made = {"prompt": PROMPT, "true_cfg_scale": scale}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def raw(x: torch.Tensor, vae: Any) -> torch.Tensor:
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.latents_mean, vae.latents_std))
    return x * std + mean


ORACLE = Oracle(
    forward,
    prompts,
    drawn=Drawn(
        options,
        lambda x: passes.pack(x[:, :, 0], 2),
        lambda x, size_hw: passes.unpack(x, 2, (size_hw[0] // 16, size_hw[1] // 16)).unsqueeze(2),
        raw,
    ),
)
