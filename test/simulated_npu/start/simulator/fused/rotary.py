"""npu_rotary_mul: rotary position embedding by cosines r1 and sines r2, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.fused.limits import FLOATS, docs, require, require_dtype, require_same_dtype

MAX_DIM = 896
MAX_BATCH_AND_HEADS = 1000
_LAYOUTS = {"BNSD": (0, 2, 1), "BSND": (0, 1, 2), "SBND": (1, 0, 2)}  # axes of batch, sequence, heads


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return input * r1 + turned * r2, turned being (-x2, x1) of halves or of neighbours, or input @ rotate."""
    _check("npu_rotary_mul", input, r1, r2, rotary_mode)
    x = input.float()
    if rotate is None:
        turned = turn(x, rotary_mode)
    else:
        require_dtype("npu_rotary_mul", "rotate", rotate, FLOATS, docs("npu_rotary_mul"))
        turned = x @ rotate.float()
    return (x * r1.float() + turned * r2.float()).to(input.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dr1, dr2), the last two summed to the shapes of r1 and r2."""
    _check("npu_rotary_mul_backward", input, r1, r2, rotary_mode)
    require_same_dtype("npu_rotary_mul_backward", docs("npu_rotary_mul"), grad=grad, input=input)
    dy, x = grad.float(), input.float()
    dx = dy * r1.float() - turn(dy * r2.float(), rotary_mode)  # turning twice negates, so its transpose is its negative
    dr1, dr2 = (dy * x).sum_to_size(r1.shape), (dy * turn(x, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(input.dtype), dr1.to(input.dtype), dr2.to(input.dtype)


def turn(x: Tensor, rotary_mode: str) -> Tensor:
    """Return each pair (x1, x2) as (-x2, x1)."""
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _check(op: str, input: Tensor, r1: Tensor, r2: Tensor, mode: str) -> None:
    source = docs("npu_rotary_mul")
    for name, each in (("input", input), ("r1", r1), ("r2", r2)):
        require(each.ndim == 4, op, f"{name} has {each.ndim} dimensions", f"{name} has 4", source)
        require_dtype(op, name, each, FLOATS, source)
    require_same_dtype(op, source, input=input, r1=r1, r2=r2)
    require(mode in ("half", "interleave"), op, f"rotary_mode {mode!r}", "half or interleave", source)
    dim = input.shape[-1]
    require(dim % 2 == 0 and dim < MAX_DIM, op, f"D {dim}", f"D is even and below {MAX_DIM}", source)
    require(
        r1.shape == r2.shape and r1.shape[-1] == dim, op, f"r1 {list(r1.shape)}, r2 {list(r2.shape)}, D {dim}",
        "r1 and r2 have one shape, ending in D", source,
    )  # fmt: skip
    fitting = [axes for axes in _LAYOUTS.values() if tuple(r1.shape[:3]) in _allowed(input.shape, axes, mode)]
    require(
        bool(fitting), op, f"{mode}: input {list(input.shape)}, r1 {list(r1.shape)}",
        "r1 and r2 are 11SD, 1S1D or S11D" + (" or full in batch, or in all" if mode == "half" else ""), source,
    )  # fmt: skip
    require(
        any(_small(input.shape, axes, mode) for axes in fitting), op, f"input {list(input.shape)}",
        f"B * N < {MAX_BATCH_AND_HEADS}" if mode == "interleave" else f"B and N < {MAX_BATCH_AND_HEADS}", source,
    )  # fmt: skip


def _allowed(shape: torch.Size, axes: tuple[int, int, int], mode: str) -> set[tuple[int, ...]]:
    batch, sequence, _ = axes
    shared = tuple(shape[i] if i == sequence else 1 for i in range(3))
    if mode == "interleave":
        return {shared}
    each = tuple(shape[i] if i in (sequence, batch) else 1 for i in range(3))
    return {shared, each, tuple(shape[:3])}


def _small(shape: torch.Size, axes: tuple[int, int, int], mode: str) -> bool:
    batch, heads = shape[axes[0]], shape[axes[2]]
    if mode == "interleave":
        return batch * heads < MAX_BATCH_AND_HEADS
    return max(batch, heads) < MAX_BATCH_AND_HEADS
