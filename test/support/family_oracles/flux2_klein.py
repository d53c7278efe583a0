"""Flux.2 Klein: Flux2Transformer2DModel without guidance, and Flux2KleinPipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from family_oracles import flux2
from oracle import PROMPT, Conditions, Drawn

LENGTH = 128  # tokens
_WITHOUT = {"guidance_embeds": False}
FOUR = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680, **_WITHOUT}
NINE = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288, **_WITHOUT}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Its own negative prompt is always empty, and it takes what is encoded."""
    made = {"prompt": PROMPT, "guidance_scale": scale, "max_sequence_length": LENGTH}
    return made if negative is None else made | {"negative_prompt_embeds": negative["tokens"]}


def folded(pipe: Any, raw: torch.Tensor) -> torch.Tensor:
    """Normalise again what it returns as latents, which is ready to be decoded."""
    bn = pipe.vae.bn
    std = torch.sqrt(bn.running_var + pipe.vae.config.batch_norm_eps)
    return (pipe._patchify_latents(raw) - bn.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


ORACLE = replace(
    flux2.ORACLE,
    released={"4b": (FOUR, 169), "9b": (NINE, 233)},
    drawn=Drawn(options, returned=folded, pixels=flux2.pixels),
    text_length=LENGTH,
)
