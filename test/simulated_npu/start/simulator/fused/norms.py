"""Normalisations: npu_rms_norm, npu_add_rms_norm, npu_layer_norm_eval. Sums in fp32, results rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from simulator.fused.limits import FLOATS, docs, require, require_dtype, require_same_dtype


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Return (y, rstd): y of the input's dtype, rstd in fp32 with 1 for each normalised dimension."""
    _check("npu_rms_norm", gamma, input=input)
    y, rstd = _normalised(input.float(), gamma, epsilon)
    return y.to(input.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx of the input's dtype, dgamma in fp32)."""
    op = "npu_rms_norm_backward"
    _check(op, gamma, input=input, dy=dy)
    require(
        rstd.dtype == torch.float32 and rstd.shape == _rstd_shape(input, gamma), op, f"rstd {rstd.dtype} {list(rstd.shape)}",
        "rstd is the forward's", docs("npu_rms_norm"),
    )  # fmt: skip
    dims = tuple(range(-gamma.ndim, 0))
    normal = input.float() * rstd
    scaled = dy.float() * gamma.float()
    dx = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * rstd
    return dx.to(input.dtype), (dy.float() * normal).sum_to_size(gamma.shape)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, rstd, x1 + x2); the sum is normalised as it was before it is rounded."""
    op = "npu_add_rms_norm"
    _check(op, gamma, x1=x1, x2=x2)
    require(x1.shape == x2.shape, op, f"x1 {list(x1.shape)}, x2 {list(x2.shape)}", "x1 and x2 have one shape", docs(op))
    total = x1.float() + x2.float()
    y, rstd = _normalised(total, gamma, epsilon)
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


def npu_layer_norm_eval(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:  # fmt: skip
    """Return layer_norm without what a backward would need."""
    require_dtype("npu_layer_norm_eval", "input", input, FLOATS, docs("npu_layer_norm_eval"))
    weight, bias = (None if each is None else each.float() for each in (weight, bias))
    return F.layer_norm(input.float(), list(normalized_shape), weight, bias, eps).to(input.dtype)


def _check(op: str, gamma: Tensor, **tensors: Tensor) -> None:
    source = docs("npu_rms_norm")
    for name, each in tensors.items():
        require_dtype(op, name, each, FLOATS, source)
        require(2 <= each.ndim <= 8, op, f"{name} has {each.ndim} dimensions", f"{name} has 2 to 8", source)
    require_same_dtype(op, source, **tensors, gamma=gamma)
    first = next(iter(tensors.values()))
    require(
        1 <= gamma.ndim <= first.ndim and gamma.shape == first.shape[first.ndim - gamma.ndim :],
        op, f"gamma {list(gamma.shape)}, input {list(first.shape)}", "gamma has the input's last dimensions", source,
    )  # fmt: skip


def _rstd_shape(x: Tensor, gamma: Tensor) -> torch.Size:
    return torch.Size([*x.shape[: x.ndim - gamma.ndim], *[1] * gamma.ndim])


def _normalised(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(tuple(range(-gamma.ndim, 0)), keepdim=True) + epsilon)
    return x * rstd * gamma.float(), rstd
