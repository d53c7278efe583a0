"""HunyuanVideo-1.5: HunyuanVideo15Transformer3DModel and HunyuanVideo15Pipeline; diffusers has no converter to compare with."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle

LENGTH = 448  # tokens: its template is long where every byte is a token


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    """Call it as the pipeline of texts does, which shows it zeros."""
    shown = x.new_zeros(x.shape[0], x.shape[1] + 1, *x.shape[2:])
    return called(net, torch.cat([x, shown], dim=1), t, told, x.new_zeros(x.shape[0], 0, net.config.image_embed_dim))


def called(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, seen: torch.Tensor) -> torch.Tensor:
    ones = [told[name].new_ones(told[name].shape[:2]) for name in ("tokens", "glyphs")]
    return net(
        hidden_states=x,
        timestep=t,
        encoder_hidden_states=told["tokens"],
        encoder_attention_mask=told.get("mask", ones[0]),
        encoder_hidden_states_2=told["glyphs"],
        encoder_attention_mask_2=told.get("glyph_mask", ones[1]),
        image_embeds=seen,
        return_dict=False,
    )[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    """Ask as the pipeline does; behind the end of a text there are zeros, which nothing looks at."""
    pipe.tokenizer_max_length = LENGTH
    made = pipe.encode_prompt(captions, device="cpu", batch_size=len(captions), dtype=torch.float32)
    tokens, mask, glyphs, glyph_mask = made
    return {
        "tokens": tokens * mask.unsqueeze(-1), "mask": mask.bool(),
        "glyphs": glyphs * glyph_mask.unsqueeze(-1), "glyph_mask": glyph_mask.bool(),
    }  # fmt: skip


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how one frame is drawn."""
    made = {"prompt": PROMPT, "scale": scale, "num_frames": 1}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def told_a_scale(pipe: Any) -> Any:
    """Let the pipeline be called with a scale, which it takes from its guider."""
    from diffusers import ClassifierFreeGuidance

    class Scaled(type(pipe)):
        def __call__(self, *, scale: float, **given: Any) -> Any:
            self.guider = ClassifierFreeGuidance(guidance_scale=scale)
            return super().__call__(**given)

    pipe.tokenizer_max_length, pipe.__class__ = LENGTH, Scaled
    return pipe


def raw(x: torch.Tensor, vae: Any) -> torch.Tensor:
    return x / vae.scaling_factor


# the releases are diffusers' defaults
ORACLE = Oracle(
    forward,
    prompts,
    drawn=Drawn(options, raw=raw, mended=told_a_scale),
    captions=('a red cat beside a sign "open"', "two dogs and a 'b'"),
    text_length=LENGTH,
    frame_times=False,
)
