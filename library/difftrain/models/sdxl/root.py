"""The one module that holds everything trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from difftrain.models.sdxl.text import CLIP_SKIP, encode_first, encode_second

if TYPE_CHECKING:
    from torch import Tensor


class SDXLRoot(nn.Module):
    """UNet, and the text encoders that are trained with it.

    Conditions hold either what a frozen encoder made (hidden_1; hidden_2 and pooled) or the ids for a trained one
    (input_ids_1, input_ids_2; with token_weights_1, token_weights_2 where captions weigh), and time_ids (B, 6).
    clip_skip: hidden_states[-clip_skip] of the encoders is read.
    """

    unet: Any
    text_encoder_1: Any  # where trained
    text_encoder_2: Any

    def __init__(self, unet: nn.Module, *, clip_skip: int = CLIP_SKIP, **text_encoders: nn.Module) -> None:
        super().__init__()
        self.clip_skip = clip_skip
        self.unet = unet
        for part, encoder in text_encoders.items():
            self.add_module(part, encoder)

    def forward(self, x_t: Tensor, timestep: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Predict. Shapes: x_t (B, C, H, W), timestep (B,) -> (B, C, H, W)."""
        hidden, pooled = self.text(conditions)
        added = {"text_embeds": pooled, "time_ids": conditions["time_ids"]}
        return self.unet(x_t, timestep, hidden, added_cond_kwargs=added, return_dict=False)[0]

    def text(self, conditions: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return hidden states (B, L, D1 + D2) and pooled (B, P), running the encoders that are trained."""
        if "input_ids_1" in conditions:
            ids, weights = conditions["input_ids_1"], conditions.get("token_weights_1")
            first = encode_first(self.text_encoder_1, ids, weights, self.clip_skip)
        else:
            first = conditions["hidden_1"]
        if "input_ids_2" in conditions:
            ids, weights = conditions["input_ids_2"], conditions.get("token_weights_2")
            second, pooled = encode_second(self.text_encoder_2, ids, weights, self.clip_skip)
        else:
            second, pooled = conditions["hidden_2"], conditions["pooled"]
        return torch.cat([first, second.to(first.dtype)], dim=-1), pooled
