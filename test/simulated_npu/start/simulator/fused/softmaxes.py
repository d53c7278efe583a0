"""npu_scaled_masked_softmax, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.fused.limits import FLOATS, docs, require, require_dtype

MASKED = -10000.0
SIDES = (32, 4096)


def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float | int = 1, fixed_triu_mask: bool = False) -> Tensor:
    """Return softmax(x * scale) over the last dimension; where the mask is True the score is -10000."""
    out = _masked_out("npu_scaled_masked_softmax", x, mask, fixed_triu_mask)
    return torch.softmax((x.float() * scale).masked_fill(out, MASKED), -1).to(x.dtype)


def npu_scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float | int, fixed_triu_mask: bool
) -> Tensor:
    """Return the gradient of x."""
    out = _masked_out("npu_scaled_masked_softmax_backward", y, mask, fixed_triu_mask)
    p, dy = y.float(), y_grad.float()
    return ((dy - (dy * p).sum(-1, keepdim=True)) * p * scale).masked_fill(out, 0.0).to(y.dtype)


def _masked_out(op: str, x: Tensor, mask: Tensor, fixed_triu_mask: bool) -> Tensor:
    source = docs("npu_scaled_masked_softmax")
    require_dtype(op, "x", x, FLOATS, source)
    require(x.ndim == 4, op, f"x has {x.ndim} dimensions", "x is N C H W", source)
    rows, columns = x.shape[-2:]
    require(
        all(SIDES[0] <= side <= SIDES[1] and side % 32 == 0 for side in (rows, columns)),
        op, f"H {rows}, W {columns}", f"H and W are {SIDES[0]} to {SIDES[1]} and multiples of 32", source,
    )  # fmt: skip
    if fixed_triu_mask:
        return torch.ones(rows, columns, dtype=torch.bool).triu_(1)
    require_dtype(op, "mask", mask, (torch.bool,), source)
    fits = mask.ndim <= 4 and all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(x.shape)))
    require(fits, op, f"mask {list(mask.shape)}, x {list(x.shape)}", "the mask broadcasts to x", source)
    return mask
