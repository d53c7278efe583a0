"""HunyuanImage 2.1: HunyuanImageTransformer2DModel and HunyuanImagePipeline, with what the distilled release is told."""

from __future__ import annotations

from typing import Any

import torch
from oracle import PROMPT, Conditions, Drawn, Oracle

from difftrain.contracts import UNTIL

LENGTH = 256  # tokens: its template is long where every byte is a token


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    ones = [told[name].new_ones(told[name].shape[:2]) for name in ("tokens", "glyphs")]
    return net(
        hidden_states=x,
        timestep=t,
        timestep_r=told.get(UNTIL, t) if net.config.use_meanflow else None,
        encoder_hidden_states=told["tokens"],
        encoder_attention_mask=told.get("mask", ones[0]),
        encoder_hidden_states_2=told["glyphs"],
        encoder_attention_mask_2=told.get("glyph_mask", ones[1]),
        guidance=torch.full_like(t, 1000 * guidance) if net.config.guidance_embeds else None,
        return_dict=False,
    )[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    """Ask as the pipeline does; behind the end of a text there are zeros, which nothing looks at."""
    pipe.tokenizer_max_length = LENGTH
    tokens, mask, glyphs, glyph_mask = pipe.encode_prompt(captions, device="cpu", batch_size=len(captions))
    return {
        "tokens": tokens * mask.unsqueeze(-1), "mask": mask.bool(),
        "glyphs": glyphs * glyph_mask.unsqueeze(-1), "glyph_mask": glyph_mask.bool(),
    }  # fmt: skip


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    return {"prompt": PROMPT, "distilled_guidance_scale": 3.25}


def shortened(pipe: Any) -> Any:
    pipe.tokenizer_max_length = LENGTH
    return pipe


def raw(x: torch.Tensor, vae: Any) -> torch.Tensor:
    return x / vae.scaling_factor


ORACLE = Oracle(
    forward,
    prompts,
    drawn=Drawn(options, raw=raw, guidance=3.25, scales=(1.0,), mended=shortened),
    captions=('a red cat beside a sign "open"', "two dogs and a 'b'"),
    text_length=LENGTH,
)
