"""Where diffusers rotates by complex tables: the function of each such family of modules, by which patch it takes real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Form:
    """patch: its row. where: of tables of a sample each, those that it takes. calls: rotations in one call of rotate."""

    patch: str
    rotate: Callable[[torch.Tensor, Any], torch.Tensor]
    where: Any = ...
    calls: int = 1


def complex_tables(samples: int, length: int, dim: int) -> torch.Tensor:
    """Make tables of angles of their own for each sample, (B, S, D / 2)."""
    angles = torch.randn(samples, length, dim // 2, generator=torch.Generator().manual_seed(9))
    return torch.polar(torch.ones_like(angles), angles)


def of_text_and_image(x: torch.Tensor, freqs: Any) -> torch.Tensor:
    from diffusers.models.transformers import transformer_qwenimage

    return transformer_qwenimage.apply_rotary_emb_qwen(x, freqs, use_real=False)


def of_grouped_heads(x: torch.Tensor, freqs: Any) -> torch.Tensor:
    from diffusers.models.transformers import transformer_lumina2

    return transformer_lumina2.apply_rotary_emb(x, freqs, use_real=False)


def of_one_stream(x: torch.Tensor, freqs: Any) -> torch.Tensor:
    """Attend with heads as they are: rotation of queries and keys is in the middle of it."""
    from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor

    attn: Any = nn.Module()
    attn.heads, attn.norm_q, attn.norm_k, attn.to_out = x.shape[2], None, None, nn.ModuleList([nn.Identity()])
    attn.to_q = attn.to_k = attn.to_v = nn.Identity()
    made = ZSingleStreamAttnProcessor()(attn, x.flatten(2), freqs_cis=freqs)
    return made.unflatten(2, x.shape[2:])


FORMS = {
    "one table": Form("complex_rotary_of_text_and_image", of_text_and_image, 0),
    "a table a sample": Form("rotary", of_grouped_heads),
    "inside a processor": Form("complex_rotary_of_one_stream", of_one_stream, calls=2),
}
