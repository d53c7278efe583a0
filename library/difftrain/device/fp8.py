"""Frozen layers in 8 bits: float8_e4m3fn with a scale for each output, made wide again where they are used.

Only the layers' memory shrinks: they compute in the dtype of the run, and gradients flow through them to what is
trained before them. What went in is kept in host memory and is what the layer's state dict gives, so that exports and
checkpoints lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.grad import conv2d_input

if TYPE_CHECKING:
    from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3fn, which has no infinity
# Layers that look at few numbers (the way into a UNet) are small, and rounding shows most in them.
FEWEST_INPUTS = 160


def why_not(kind: str) -> str:
    """Say why a kind of device cannot compute with such layers; empty where it can.

    Source: CANN's Cast operator, whose documents have fp8 from the Ascend 950 on.
    """
    return "the NPUs of the A2 and A3 series have no 8-bit floats" if kind == "npu" else ""


def store(module: nn.Module) -> list[str]:
    """Put the frozen linear and convolution layers inside a module into 8 bits, in place; return their names."""
    layers = [(name, layer) for name, layer in module.named_modules() if _fits(layer)]
    for _, layer in layers:
        layer.__class__ = _KINDS[type(layer)]
        layer._hold()  # type: ignore[operator]
    return [name for name, _ in layers]


def release(module: nn.Module) -> None:
    """Undo `store`: give the layers inside a module back what they were made of."""
    for layer in module.modules():
        if isinstance(layer, _Fp8Weight):
            layer.let_go()
            layer.__class__ = _PLAIN[type(layer)]  # type: ignore[assignment]


def refresh(module: nn.Module) -> None:
    """Round anew what has been written into the state dict's tensors."""
    for layer in module.modules():
        if isinstance(layer, _Fp8Weight):
            layer.round_again()


def stored_names(module: nn.Module) -> Iterator[str]:
    """Name the parameters that are in 8 bits."""
    return (name for name, parameter in module.named_parameters() if parameter.dtype == FP8)


def _fits(layer: nn.Module) -> bool:
    if type(layer) not in _KINDS or any(param.requires_grad for param in layer.parameters(recurse=False)):
        return False
    plain = getattr(layer, "padding_mode", "zeros") == "zeros" and not isinstance(getattr(layer, "padding", 0), str)
    return plain and layer.weight[0].numel() >= FEWEST_INPUTS  # type: ignore[index, union-attr, operator]


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in 8 bits and the scale of each output, a power of two: rounding what was rounded changes no value."""
    wide = weight.float()
    largest = wide.abs().amax(tuple(range(1, wide.ndim)), keepdim=True)
    scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / _LARGEST))), 1.0)
    return (wide / scale).to(FP8), scale


def expand(small: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a weight wide again; exact in bf16 and fp32."""
    return small.to(dtype) * scale.to(dtype)


class _Fp8Weight(nn.Module):
    """What the two kinds of layers share."""

    weight: Any
    bias: Any
    scale: Tensor

    def _hold(self) -> None:
        self.__dict__["original"] = self.weight.detach()  # no parameter and no buffer: it stays on the host
        small, scale = compress(self.weight.detach())
        self.weight = nn.Parameter(small, requires_grad=False)
        self.register_buffer("scale", scale, persistent=False)

    def let_go(self) -> None:
        self.weight = nn.Parameter(self.__dict__.pop("original"), requires_grad=False)
        del self.scale

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.weight.is_meta:  # the layer gives its memory back
            self.__dict__["original"] = self.__dict__["original"].to("meta")
        return self

    @torch.no_grad()
    def round_again(self) -> None:
        small, scale = compress(self.__dict__["original"])
        self.weight.copy_(small)
        self.scale.copy_(scale)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.__dict__["original"]

    def _ready(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return input and bias in the dtype to compute in: autocast's, else the input's."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return x.to(dtype), None if self.bias is None else self.bias.to(dtype)


class Fp8Linear(_Fp8Weight, nn.Linear):
    """A frozen linear layer in 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self._ready(x)
        return _Linear.apply(x, self.weight, self.scale, bias)  # type: ignore[no-any-return]


class Fp8Conv2d(_Fp8Weight, nn.Conv2d):
    """A frozen convolution in 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self._ready(x)
        how = (self.stride, self.padding, self.dilation, self.groups)
        return _Conv2d.apply(x, self.weight, self.scale, bias, how)  # type: ignore[no-any-return]


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Fp8Linear, nn.Conv2d: Fp8Conv2d}
_PLAIN = {stored_names: plain for plain, stored_names in _KINDS.items()}


class _Linear(torch.autograd.Function):
    """x W' + b, keeping the 8 bits for the backward pass instead of the wide weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(small, scale)
        return F.linear(x, expand(small, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        small, scale = ctx.saved_tensors
        return grad @ expand(small, scale, grad.dtype), None, None, None


class _Conv2d(torch.autograd.Function):
    """The same for a convolution. how: stride, padding, dilation, groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Tensor, scale: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        ctx.save_for_backward(small, scale)
        ctx.how, ctx.shape = how, x.shape
        return F.conv2d(x, expand(small, scale, x.dtype), bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        small, scale = ctx.saved_tensors
        wide = expand(small, scale, grad.dtype)
        return conv2d_input(ctx.shape, wide, grad, *ctx.how), None, None, None, None
