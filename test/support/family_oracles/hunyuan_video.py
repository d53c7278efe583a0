"""HunyuanVideo: HunyuanVideoTransformer3DModel, HunyuanVideoPipeline and the original layout."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle

LENGTH = 400  # tokens: its template is long where every byte is a token


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    tokens = told["tokens"]
    return net(
        hidden_states=x,
        timestep=t,
        encoder_hidden_states=tokens,
        encoder_attention_mask=told.get("mask", tokens.new_ones(tokens.shape[:2])),
        pooled_projections=told["pooled"],
        guidance=torch.full_like(t, 1000 * guidance) if net.config.guidance_embeds else None,
        return_dict=False,
    )[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    """Ask as the pipeline does; behind the end of a text there are zeros, which nothing looks at."""
    tokens, pooled, mask = pipe.encode_prompt(captions, max_sequence_length=LENGTH, device="cpu")
    return {"tokens": tokens * mask.unsqueeze(-1), "mask": mask.bool(), "pooled": pooled}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how one frame is drawn."""
    made = {
        "prompt": PROMPT, "guidance_scale": 3.25, "true_cfg_scale": scale, "max_sequence_length": LENGTH, "num_frames": 1,
    }  # fmt: skip
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def raw(x: torch.Tensor, vae: Any) -> torch.Tensor:
    return x / vae.scaling_factor


# the release is diffusers' defaults
ORACLE = Oracle(
    forward,
    prompts,
    "convert_hunyuan_video_transformer_to_diffusers",
    released={"t2v": ({}, 1264)},
    drawn=Drawn(options, raw=raw, guidance=3.25),
    captions=('a red cat beside a sign "open"', "two dogs and a 'b'"),
    text_length=LENGTH,
    frame_times=False,
)
