"""Attention of a VAE over the frames of a clip, each over itself and those before it.

diffusers' HunyuanVideo15AttnBlock lays a float mask of the square of all positions, which it fills in a loop over positions
on the host, and which does not fit a batch of several clips. A frame's queries over the keys so far need no mask, half the
products, and memory for one frame's scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.device.attend import attention
from difftrain.device.patches import PatchHook, Undo

if TYPE_CHECKING:
    from torch import Tensor


def attend_by_frames(q: Tensor, k: Tensor, v: Tensor, frames: int) -> Tensor:
    """Attend over the keys of the same frame and of those before it. Shapes: (B, N, F S, D) each, and the result."""
    size = q.shape[2] // frames
    return torch.cat(
        [
            attention(q[:, :, end - size : end], k[:, :, :end], v[:, :, :end])
            for end in range(size, size * frames + 1, size)
        ],
        dim=2,
    )


def _lays_a_mask() -> bool:
    """Tell whether the module, as it came, attends under a mask that it makes itself."""
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    return "prepare_causal_attention_mask" in HunyuanVideo15AttnBlock.forward.__code__.co_names


def _put() -> Undo:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    kind: Any = HunyuanVideo15AttnBlock
    upstream = kind.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        """Shapes: (B, C, F, H, W) -> the same."""
        normed, shape = self.norm(x), x.shape
        q, k, v = (
            layer(normed).flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        attended = attend_by_frames(q, k, v, shape[2]).squeeze(1).transpose(1, 2).reshape(shape)
        out: Tensor = self.proj_out(attended)
        return out + x

    kind.forward = forward

    def undo() -> None:
        kind.forward = upstream

    return undo


CAUSAL_FRAMES = PatchHook(_lays_a_mask, _put)
