"""Fused kernels where they pay: one function each, chosen by the tensor it is given.

Where the NPU's documented limits (spec of CANN 8) take the tensors, its fused operator runs; everywhere else the plain
version, which is bit by bit what diffusers computes. Nothing here looks at what is installed, and nothing waits for the
host. All are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from difftrain.device import adamw as adamw_
from difftrain.device.counters import count

if TYPE_CHECKING:
    from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_TAKEN = (*_HALF, torch.float32)
_EXACT_GELU = 0  # npu_geglu's own default, 1, is the tanh form: 6.6e-4 off
_MOST_ROTARY_DIM = 896
_MOST_ROTARY_SIZE = 1000
_ALIGNED = 8  # fp32 elements in 32 bytes


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Return x / rms(x) times weight, over the last dimension, computed in fp32.

    Shapes: x (..., D), weight (D) -> (..., D). The result is of the weight's dtype, of x's where there is no weight.
    """
    return _run("rms_norm", x, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs of x, in fp32: neighbours where interleaved, else one of each half.

    Shapes: x (B, N, S, D) or (B, S, N, D); cos and sin of four dimensions, broadcast to x. Returns x's dtype.
    """
    return _run("rotary", x, cos, sin, interleaved)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(a) b for the halves a, b of the last dimension; diffusers' SwiGLU has them the other way round."""
    return _run("swiglu", x)


def geglu(x: Tensor) -> Tensor:
    """Return a gelu(b) for the halves a, b of the last dimension, with the exact GELU."""
    return _run("geglu", x)


def adamw(params: Sequence[Tensor], *others: Sequence[Tensor], **settings: Any) -> None:
    """Update in place, with the arguments of torch._fused_adamw_; found_inf and grad_scale are honoured."""
    return _run("adamw", params, *others, **settings)


# ------------------------------------------------------------------ plain versions


def plain_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return out.to(x.dtype)
    return (out.to(weight.dtype) if weight.dtype in _HALF else out) * weight


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    else:
        real, imaginary = x.unflatten(-1, (2, -1)).unbind(-2)
        turned = torch.cat([-imaginary, real], dim=-1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def plain_swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def plain_geglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return a * F.gelu(b)


# ------------------------------------------------------------------ the NPU's


def _npu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = weight.dtype if x.dtype == weight.dtype else torch.float32  # the operator wants one dtype
    return _npu().npu_rms_norm(x.to(dtype), weight.to(dtype), epsilon=eps)[0].to(weight.dtype)


def _npu_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    mode = "interleave" if interleaved else "half"
    return _npu().npu_rotary_mul(x.float(), cos.float(), sin.float(), mode).to(x.dtype)


def _npu_swiglu(x: Tensor) -> Tensor:
    return _npu().npu_swiglu(x, -1)


def _npu_geglu(x: Tensor) -> Tensor:
    return _npu().npu_geglu(x, -1, _EXACT_GELU)[0]


def _npu() -> Any:
    import torch_npu

    return torch_npu


# ------------------------------------------------------------------ when they apply


def _not_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    if weight is None:
        return "the operator wants a weight"
    if weight.dtype not in _TAKEN:
        return f"weight of {weight.dtype}"
    if not 2 <= x.ndim <= 8 or weight.shape != x.shape[-1:]:
        return f"shapes {tuple(x.shape)} and {tuple(weight.shape)}: 2 to 8 dimensions, weight as the last"
    return _not_taken(x)


def _not_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> str | None:
    if x.ndim != 4 or cos.ndim != 4 or cos.shape != sin.shape:
        return "x, cos and sin have four dimensions, cos and sin the same"
    if cos.requires_grad or sin.requires_grad:
        return "cos and sin are trained"
    batch, second, third, dim = x.shape
    if dim % _ALIGNED or dim >= _MOST_ROTARY_DIM or cos.shape[-1] != dim:
        return f"head size {dim}: a multiple of {_ALIGNED} below {_MOST_ROTARY_DIM}"
    found = tuple(cos.shape[:3])
    layouts = {"BNSD": [(1, 1, third)], "BSND": [(1, second, 1)]}
    if not interleaved:
        layouts["BNSD"] += [(batch, 1, third), (batch, second, third)]
        layouts["BSND"] += [(batch, second, 1)]
    fitting = [heads for name, heads in (("BNSD", second), ("BSND", third)) if found in layouts[name]]
    if not fitting:
        return f"cos of shape {tuple(cos.shape)} for x of {tuple(x.shape)}"
    size = batch * max(fitting) if interleaved else max(batch, *fitting)
    return _not_taken(x) if size < _MOST_ROTARY_SIZE else f"batch {batch} and {max(fitting)} heads"


def _not_halves(x: Tensor) -> str | None:
    if not 1 <= x.ndim <= 8 or x.shape[-1] % 2:
        return f"shape {tuple(x.shape)}: 1 to 8 dimensions, the last even"
    return _not_taken(x)


def _not_taken(x: Tensor) -> str | None:
    if x.dtype not in _TAKEN:
        return f"{x.dtype}"
    return None if x.numel() else "no elements"


class Kernel(NamedTuple):
    """A fused function, the plain version, and why the fused one cannot take some tensors (None where it can)."""

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    why_not: Callable[..., str | None]


REGISTRY: dict[str, Kernel] = {
    "rms_norm": Kernel(_npu_rms_norm, plain_rms_norm, _not_rms_norm),
    "rotary": Kernel(_npu_rotary, plain_rotary, _not_rotary),
    "swiglu": Kernel(_npu_swiglu, plain_swiglu, _not_halves),
    "geglu": Kernel(_npu_geglu, plain_geglu, _not_halves),
    "adamw": Kernel(adamw_.npu_adamw, adamw_.upstream, adamw_.why_not),
}


def _run(name: str, x: Tensor | Sequence[Tensor], *others: Any, **settings: Any) -> Any:
    kernel = REGISTRY[name]
    first = x if isinstance(x, torch.Tensor) else x[0]
    if first.device.type == "npu" and kernel.why_not(x, *others, **settings) is None:
        count(f"{name} fused")
        return kernel.fused(x, *others, **settings)
    count(f"{name} plain")
    return kernel.plain(x, *others, **settings)
