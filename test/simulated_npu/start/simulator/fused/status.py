"""The float status register, by which devices without INF/NAN mode tell that fp16 overflowed."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.fused.limits import docs, require

SIZE = 8  # the register as a tensor


def npu_alloc_float_status(input: Tensor) -> Tensor:
    """Return eight zeros."""
    return torch.zeros(SIZE)


def npu_clear_float_status(input: Tensor, mode: int = 0) -> Tensor:
    """Forget an overflow, and return eight zeros."""
    _check("npu_clear_float_status", input)
    _take(clear=True)
    return torch.zeros(SIZE)


def npu_get_float_status(input: Tensor, mode: int = 0) -> Tensor:
    """Return eight numbers; the first is not zero after an overflow since the last clearing."""
    _check("npu_get_float_status", input)
    return torch.full((SIZE,), float(_take(clear=False)))


def _check(op: str, input: Tensor) -> None:
    require(
        input.dtype == torch.float32 and input.numel() == SIZE, op, f"{input.dtype}, {input.numel()} elements",
        "float32, of eight elements", docs(op),
    )  # fmt: skip


def _take(*, clear: bool) -> bool:
    """Ask the kernels whether one of their fp16 results had to be saturated; without kernels nothing was."""
    if not hasattr(torch.ops.simulated_npu, "overflowed"):
        return False
    return bool(torch.ops.simulated_npu.overflowed(clear))
