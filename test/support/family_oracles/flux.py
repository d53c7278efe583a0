"""Flux.1: FluxTransformer2DModel, FluxPipeline and the original layout."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle

from difftrain.models import passes


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    from diffusers import FluxPipeline

    (count, _, height, width), tokens = x.shape, told["tokens"]
    packed = FluxPipeline._pack_latents(x, *x.shape)
    ids = FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, x.device, x.dtype)
    out = net(
        hidden_states=packed,
        timestep=t / 1000,
        guidance=torch.full_like(t, guidance) if net.config.guidance_embeds else None,
        pooled_projections=told["pooled"],
        encoder_hidden_states=tokens,
        txt_ids=torch.zeros(tokens.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(out, 8 * height, 8 * width, 8)


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    tokens, pooled, _ = pipe.encode_prompt(captions, None, device="cpu", max_sequence_length=length)
    return {"tokens": tokens, "pooled": pooled}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    made = {"prompt": PROMPT, "guidance_scale": 3.5, "max_sequence_length": 32}
    return made if negative is None else made | {"negative_prompt": NEGATIVE, "true_cfg_scale": scale}


# FLUX.1-dev is what diffusers' defaults are but for its guidance
ORACLE = Oracle(
    forward,
    prompts,
    "convert_flux_transformer_checkpoint_to_diffusers",
    released={"dev": ({"guidance_embeds": True}, 1160), "schnell": ({"guidance_embeds": False}, 1156)},
    drawn=Drawn(
        options,
        lambda x: passes.pack(x, 2),
        lambda x, size_hw: passes.unpack(x, 2, (size_hw[0] // 16, size_hw[1] // 16)),
        guidance=3.5,
        t5_length=32,
    ),
)
