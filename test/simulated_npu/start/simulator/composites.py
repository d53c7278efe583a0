"""Operators that are not on the device what they are on the CPU: compositions here, other behaviour there."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_backward(grad: Tensor, self: Tensor, other: Tensor, mask: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of self @ other, of any numbers of dimensions."""
    if not mask[0] and not mask[1]:
        return None, None
    left = self.unsqueeze(0) if self.ndim == 1 else self
    right = other.unsqueeze(-1) if other.ndim == 1 else other
    if self.ndim == 1:
        grad = grad.unsqueeze(-1 if other.ndim == 1 else -2)
    if other.ndim == 1:
        grad = grad.unsqueeze(-1)
    of_left = torch.matmul(grad, right.mT).sum_to_size(left.shape).reshape(self.shape) if mask[0] else None
    of_right = torch.matmul(left.mT, grad).sum_to_size(right.shape).reshape(other.shape) if mask[1] else None
    return of_left, of_right


def linear_backward(
    self: Tensor, grad: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias of a linear layer."""
    rows = grad.reshape(-1, grad.shape[-1])
    of_input = torch.matmul(grad, weight) if mask[0] else None
    of_weight = torch.matmul(rows.mT, self.reshape(-1, self.shape[-1])) if mask[1] else None
    return of_input, of_weight, rows.sum(0) if mask[2] else None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Route as torch_npu does: to npu_fusion_attention with whatever mask was given, else to the plain formula.

    Source: op-plugin, ScaledDotProductAttentionKernelNpuOpApi.cpp. The wheel's own makes its causal mask without the
    dispatcher, which is why it is written again here.
    """
    fits = (
        query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and (attn_mask is None or attn_mask.dtype == torch.bool)
        and query.ndim == key.ndim == value.ndim == 4
        and query.shape[1] <= 2048
        and key.shape[1] <= 2048
        and query.shape[3] <= 512
        and query.shape[1] % key.shape[1] == 0
    )
    if not fits:
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
        return torch._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    if is_causal:
        out = torch.ones(2048, 2048, dtype=torch.bool, device=query.device).triu(1)
    else:
        out = None if attn_mask is None else _of_full_size(attn_mask.logical_not(), query, key)
    return torch.ops.npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "BNSD",
        atten_mask=out,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        keep_prob=1 - dropout_p,
        next_tockens=0 if is_causal else 2147483647,
        sparse_mode=2 if is_causal else 0,
    )[0]


def _of_full_size(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Expand a mask that broadcasts, as torch_npu's list of supported APIs says of its attention."""
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    batch, heads = mask.shape[:2]
    if heads > 1:
        batch = query.shape[0]
    return mask.expand(batch, heads, query.shape[2], key.shape[2])
