"""The attention function as a processor of diffusers' Attention modules: those of UNets and VAEs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.device.attend import attention

if TYPE_CHECKING:
    from torch import Tensor

# A float bias in diffusers' UNet is 0 where kept and -10000 where not.
_DROPPED_BELOW = -1000.0


class AttentionProcessor:
    """Do what diffusers' AttnProcessor2_0 does, with `attention`.

    A float mask is read as diffusers writes it, 0 = keep and -10000 = drop, and handed on as bool.
    """

    def __init__(self, fused: bool = True) -> None:
        self.fused = fused

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Attend over (B, L, C), or (B, C, H, W) with its positions as the sequence."""
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if residual.ndim == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        keep = _keep_mask(attn, attention_mask, context)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        if encoder_hidden_states is None:
            context = hidden_states
        elif attn.norm_cross:
            context = attn.norm_encoder_hidden_states(context)

        q, k, v = (
            split_heads(project(x), attn.heads).transpose(1, 2)
            for project, x in ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        )
        if attn.norm_q is not None:
            q = attn.norm_q(q)
        if attn.norm_k is not None:
            k = attn.norm_k(k)
        out = attention(q, k, v, keep, fused=self.fused).transpose(1, 2).flatten(2).to(q.dtype)

        out = attn.to_out[1](attn.to_out[0](out))
        if residual.ndim == 4:
            out = out.transpose(1, 2).reshape(residual.shape)
        if attn.residual_connection:
            out = out + residual
        return out / attn.rescale_output_factor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, N D) -> (B, L, N, D)."""
    return x.unflatten(-1, (heads, -1))


def _keep_mask(attn: Any, mask: Tensor | None, context: Tensor) -> Tensor | None:
    """Return diffusers' mask as bool, True = keep, of shape (B, 1 or N, 1 or S, L)."""
    if mask is None:
        return None
    batch, length = context.shape[:2]
    if mask.shape[0] == batch and mask.shape[-1] == length and mask.ndim <= 3:
        mask = mask.reshape(batch, 1, -1, length)  # one for all heads
    else:
        mask = attn.prepare_attention_mask(mask, length, batch)
        mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
    return mask if mask.dtype == torch.bool else mask > _DROPPED_BELOW
