"""Text conditions of SD3: what three encoders make of a caption, and how it becomes one sequence and one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.parts.stand_in import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig

T5_MASK = "t5_mask"
HIDDEN = -2  # hidden_states of CLIP that are read: the last but one
OUTPUTS = {
    "text_encoder_1": ("hidden_1", "pooled_1"),
    "text_encoder_2": ("hidden_2", "pooled_2"),
    "text_encoder_3": ("hidden_3",),
}


def inputs_of(part: str) -> tuple[str, ...]:
    """Name what an encoder reads; the mask only where a tokenizer makes one."""
    ids = f"input_ids_{part[-1]}"
    return (ids, T5_MASK) if part == "text_encoder_3" else (ids,)


@torch.no_grad()
def encode(part: str, encoder: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Encode the ids of one encoder. Shapes: (B, L) -> hidden (B, L, D); of CLIP also pooled (B, P)."""
    ids = given[f"input_ids_{part[-1]}"]
    if part == "text_encoder_3":
        return {OUTPUTS[part][0]: encode_t5(encoder, ids, given.get(T5_MASK))}
    out = encoder(ids, output_hidden_states=True, return_dict=True)
    return dict(zip(OUTPUTS[part], (out.hidden_states[HIDDEN], out.text_embeds), strict=True))


def encode_t5(encoder: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Encode with T5, (B, L) -> (B, L, D). mask (B, L): rows that it leaves out are neither read nor anything but zeros.

    In fp16 without autocast, which would also put into fp16 what overflows there (see parts/stand_in.py).
    """
    dtype = encoder.shared.weight.dtype
    half = dtype == torch.float16
    with torch.autocast(ids.device.type, enabled=not half and torch.is_autocast_enabled(ids.device.type)):
        hidden = encoder(ids, attention_mask=None if mask is None else mask.long(), return_dict=True).last_hidden_state
    hidden = hidden.to(dtype)
    return hidden if mask is None else torch.where(mask.bool().unsqueeze(-1), hidden, torch.zeros_like(hidden))


def joined(found: Mapping[str, Tensor], keep: Sequence[Tensor | None], width: int) -> tuple[Tensor, Tensor]:
    """Make tokens (B, 77 + L, width) and the pooled vector (B, P1 + P2), both fp32, of all three encoders' outputs.

    CLIP's two stand side by side, filled up with zeros; T5's come behind them. keep: which samples keep an encoder's
    outputs, (B,) bool each, or None for all; the others get zeros for its tokens and its pooled vector.
    """
    one, two, three = (_zeroed(found[f"hidden_{i}"], keep[i - 1]) for i in (1, 2, 3))
    clip = torch.cat([one, two], dim=-1)
    clip = torch.nn.functional.pad(clip, (0, width - clip.shape[-1]))
    pooled = torch.cat([_zeroed(found[f"pooled_{i}"], keep[i - 1]) for i in (1, 2)], dim=-1)
    return torch.cat([clip, three], dim=1), pooled


def _zeroed(value: Tensor, keep: Tensor | None) -> Tensor:
    value = value.float()
    if keep is None:
        return value
    return torch.where(keep.view(-1, *(1,) * (value.ndim - 1)), value, torch.zeros_like(value))


def feature_dtype(cfg: TrainConfig) -> str:
    """Name the dtype of the encoders' outputs: that of autocast, in which their weights are kept too."""
    return str(DTYPES[cfg.training.mixed_precision]).removeprefix("torch.")
