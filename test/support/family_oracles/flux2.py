"""Flux.2 dev: Flux2Transformer2DModel, Flux2Pipeline and the original layout."""

from __future__ import annotations

from typing import Any

import torch
from oracle import PROMPT, Conditions, Drawn, Oracle

LENGTH = 256  # tokens: its template is long


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    from diffusers import Flux2Pipeline

    tokens, ids = told["tokens"], Flux2Pipeline._prepare_latent_ids(x)
    out = net(
        hidden_states=Flux2Pipeline._pack_latents(x),
        timestep=t / 1000,
        guidance=torch.full_like(t, guidance) if net.config.guidance_embeds else None,
        encoder_hidden_states=tokens,
        txt_ids=Flux2Pipeline._prepare_text_ids(tokens),
        img_ids=ids,
        return_dict=False,
    )[0]
    return Flux2Pipeline._unpack_latents_with_ids(out, ids)


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    return {"tokens": pipe.encode_prompt(captions, device="cpu", max_sequence_length=length)[0]}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    return {"prompt": PROMPT, "guidance_scale": 4.0, "max_sequence_length": LENGTH}


def unpack(x: torch.Tensor, size_hw: tuple[int, int]) -> torch.Tensor:
    return x.transpose(1, 2).unflatten(2, (size_hw[0] // 16, size_hw[1] // 16))


def pixels(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    bn = pipe.vae.bn
    raw = latents * torch.sqrt(bn.running_var + pipe.vae.config.batch_norm_eps).view(1, -1, 1, 1)
    return pipe.vae.decode(pipe._unpatchify_latents(raw + bn.running_mean.view(1, -1, 1, 1))).sample


# FLUX.2-dev is what diffusers' defaults are
ORACLE = Oracle(
    forward,
    prompts,
    "convert_flux2_transformer_checkpoint_to_diffusers",
    released={"dev": ({}, 331)},
    drawn=Drawn(options, unpack=unpack, guidance=4.0, scales=(1.0,), pixels=pixels),
    text_length=LENGTH,
)
