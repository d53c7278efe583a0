"""Activations and gated activations: npu_swiglu, npu_geglu, npu_gelu, npu_fast_gelu, npu_silu, forward and backward."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from simulator.fused.limits import FLOATS, docs, require, require_dtype, require_same_dtype

TANH, EXACT = 1, 0  # npu_geglu's approximate
FAST = 1.702
_OLD_FLOATS = (torch.float16, torch.float32)


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Return silu(a) * b, where a and b are the halves of the input along dim."""
    a, b = _halves("npu_swiglu", input, dim)
    return (F.silu(a) * b).to(input.dtype)


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Return the gradient of npu_swiglu's input."""
    a, b = _halves("npu_swiglu_backward", input, dim)
    require_same_dtype("npu_swiglu_backward", docs("npu_swiglu"), grad_output=grad_output, input=input)
    dy, gate = grad_output.float(), torch.sigmoid(a)
    return torch.cat((dy * b * gate * (1 + a * (1 - gate)), dy * F.silu(a)), dim).to(input.dtype)


def npu_geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """Return (product, gelu of the gate): the gate is the right half unless activate_left."""
    value, gate = _value_and_gate("npu_geglu", input, dim, approximate, activate_left)
    activated = F.gelu(gate, approximate=_words(approximate))
    return (value * activated).to(input.dtype), activated.to(input.dtype)


def npu_geglu_grad(
    grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> Tensor:
    """Return the gradient of npu_geglu's input, from the gelu that the forward rounded."""
    op = "npu_geglu_grad"
    value, gate = _value_and_gate(op, input, dim, approximate, activate_left)
    require_same_dtype(op, docs("npu_geglu"), grad_output=grad_output, input=input, gelu=gelu)
    dy = grad_output.float()
    of_value = dy * gelu.float()
    of_gate = dy * value * gelu_slope(gate, _words(approximate))
    pair = (of_gate, of_value) if activate_left else (of_value, of_gate)
    return torch.cat(pair, dim).to(input.dtype)


def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Return gelu, exact or by tanh."""
    _check_gelu("npu_gelu", input, approximate)
    return F.gelu(input.float(), approximate=approximate).to(input.dtype)


def npu_gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = "none") -> Tensor:
    """Return the gradient of npu_gelu's input."""
    _check_gelu("npu_gelu_backward", input, approximate)
    return (grad_output.float() * gelu_slope(input.float(), approximate)).to(input.dtype)


def npu_fast_gelu(input: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x): the formula of the A2 and A3 series."""
    require_dtype("npu_fast_gelu", "input", input, FLOATS, docs("npu_fast_gelu"))
    return _fast(input)


def fast_gelu(input: Tensor) -> Tensor:
    """Return npu_fast_gelu under its old name, which is documented for two dtypes."""
    require_dtype("fast_gelu", "input", input, _OLD_FLOATS, docs("fast_gelu"))
    return _fast(input)


def npu_fast_gelu_backward(grad: Tensor, input: Tensor) -> Tensor:
    """Return the gradient of fast gelu's input."""
    require_dtype("npu_fast_gelu_backward", "input", input, FLOATS, docs("npu_fast_gelu"))
    x = input.float()
    gate = torch.sigmoid(FAST * x)
    return (grad.float() * gate * (1 + FAST * x * (1 - gate))).to(input.dtype)


def npu_silu(input: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    require_dtype("npu_silu", "input", input, _OLD_FLOATS, docs("npu_silu"))
    return F.silu(input.float()).to(input.dtype)


def npu_silu_(input: Tensor) -> Tensor:
    """Write x * sigmoid(x) in the place of x."""
    return input.copy_(npu_silu(input))


def npu_silu_backward(grad_output: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    """Return the gradient of npu_silu's input x0; x1 is what it returned."""
    require_dtype("npu_silu_backward", "x0", x0, _OLD_FLOATS, docs("npu_silu"))
    gate = torch.sigmoid(x0.float())
    return (grad_output.float() * (gate + x1.float() * (1 - gate))).to(x0.dtype)


def gelu_slope(x: Tensor, approximate: str) -> Tensor:
    """Return the derivative of gelu."""
    if approximate == "none":
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    tanh = torch.tanh(inner)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def _fast(input: Tensor) -> Tensor:
    x = input.float()
    return (x * torch.sigmoid(FAST * x)).to(input.dtype)


def _check_gelu(op: str, input: Tensor, approximate: str) -> None:
    require_dtype(op, "input", input, FLOATS, docs("npu_gelu_mul"))
    require(approximate in ("none", "tanh"), op, f"approximate {approximate!r}", "none or tanh", docs("npu_gelu_mul"))


def _words(approximate: int) -> str:
    return "tanh" if approximate == TANH else "none"


def _halves(op: str, input: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    source = docs("npu_geglu" if "geglu" in op else "npu_swiglu")
    require_dtype(op, "input", input, FLOATS, source)
    require(1 <= input.ndim <= 8, op, f"input has {input.ndim} dimensions", "input has 1 to 8", source)
    require(-input.ndim <= dim < input.ndim, op, f"dim {dim} of {input.ndim}", "dim is one of the input's", source)
    require(input.shape[dim] % 2 == 0, op, f"size {input.shape[dim]} along dim {dim}", "that size is even", source)
    a, b = input.float().chunk(2, dim)
    return a, b


def _value_and_gate(op: str, input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    require(approximate in (EXACT, TANH), op, f"approximate {approximate}", "0 is exact, 1 is tanh", docs("npu_geglu"))
    left, right = _halves(op, input, dim)
    return (right, left) if activate_left else (left, right)
