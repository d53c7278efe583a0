"""Frozen layers whose weights are stored in few bits, and made wide again where they are used.

Only the layers' memory shrinks: they compute in the dtype of the run, and gradients flow through them to what is
trained before them. The backward pass makes the weight wide again, too: no wide one waits for it.

bf16: the upper half of fp32. fp8: float8_e4m3fn with a scale for each output, a power of two; a file that is stored so is
taken as it is, with its own scale. int8: the largest of each output is 127. nf4: 16 levels that are quantiles of a normal
distribution, for blocks of 64 numbers with their largest in fp32 (Dettmers et al., QLoRA, 2023, arXiv:2305.14314,
appendix E; scales are not quantised a second time).

What is stored are integers, so that no cast of a module touches them. A weight is codes times scale in fp32, rounded
once to the dtype that is computed in: products of single numbers and look-ups in tables alone, which every device makes
with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.grad import conv2d_input

from difftrain.device import nf4_kernel

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["bf16", "fp8", "int8", "nf4"]
FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3fn, which has no infinity
BLOCK = 64  # numbers of nf4 that share a scale
_CHUNK = 1 << 17  # numbers that stay in a core's cache between two operations
# Layers that look at few numbers (the way into a UNet) are small, and rounding shows most in them.
FEWEST_INPUTS = 160
# information-theoretically best levels for normal numbers in -1..1, zero among them (QLoRA, appendix E)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def why_not(kind: str) -> str:
    """Say why a kind of device cannot compute with fp8; empty where it can.

    Source: CANN's Cast operator, whose documents have fp8 from the Ascend 950 on.
    """
    return "the NPUs of the A2 and A3 series have no 8-bit floats" if kind == "npu" else ""


# --- Weights in few bits: to codes and scales, and back


class Stored(NamedTuple):
    """A weight as a file of fp8 has it: float8_e4m3fn, and the scale that it is multiplied with, () or (out, 1)."""

    codes: Tensor
    scale: Tensor

    def wide(self) -> Tensor:
        """Return it in fp32."""
        return self.codes.float() * self.scale.float()


def widened(weights: Iterable[tuple[str, Tensor | Stored]]) -> Iterator[tuple[str, Tensor]]:
    """Give weights of fp8 in fp32, with their scales."""
    return ((name, value.wide() if isinstance(value, Stored) else value) for name, value in weights)


def encode(kind: Kind, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a weight. Shapes: (out, ...) -> as it is, of bf16 twice as wide, of nf4 (blocks, 32); (out, 1, ...) or (blocks, 1)."""
    if kind == "bf16":
        # bytes: collectives of some devices have no integers of 16 bits
        return weight.to(torch.bfloat16).contiguous().view(torch.uint8), torch.ones((), device=weight.device)
    wide = weight.float()
    if kind == "nf4":
        return _encode_nf4(wide)
    largest = wide.abs().amax(tuple(range(1, wide.ndim)), keepdim=True)
    if kind == "fp8":
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / _LARGEST))), 1.0)
        return (wide / scale).to(FP8).view(torch.uint8), scale
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (wide / scale).round_().to(torch.int8), scale


def _encode_nf4(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Take the nearest level for each number, two in a byte, the first one above; what fills the last block is 0."""
    blocks = F.pad(wide.flatten(), (0, -wide.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    edges = [(low + high) / 2 for low, high in pairwise(NF4)]
    nearest = torch.zeros(blocks.shape, dtype=torch.uint8, device=wide.device)
    for these in _chunks(blocks):
        unit = blocks[these] / torch.where(scale[these] > 0, scale[these], 1.0)
        for edge in edges:
            nearest[these] += unit > edge
    return nearest[:, 0::2] * 16 + nearest[:, 1::2], scale


def decode(kind: str, shape: torch.Size, dtype: torch.dtype, codes: Tensor, scale: Tensor, levels: Tensor) -> Tensor:
    """Make a weight wide again. levels: what each byte of fp8 and nf4 stands for, (256, 1) or (256, 2)."""
    if kind == "bf16":
        even = codes.storage_offset() % 2 == 0  # a piece of what an engine gathers may lie anywhere
        return (codes if even else codes.clone()).view(torch.bfloat16).to(dtype)
    if kind == "nf4" and shape.numel() >= nf4_kernel.FEWEST and not (codes.is_meta or torch.compiler.is_compiling()):
        widen = nf4_kernel.faster(codes.device, dtype, partial(_scaled, kind, dtype), levels)
        return widen(codes, scale, levels)[: shape.numel()].view(shape)
    return _scaled(kind, dtype, codes, scale, levels)[: shape.numel()].view(shape)


def _scaled(kind: str, dtype: torch.dtype, codes: Tensor, scale: Tensor, levels: Tensor) -> Tensor:
    """Return the numbers of a weight one after another, with those that fill a last block."""
    rows = codes.flatten(1)
    factors = scale.reshape(-1, 1)
    if codes.device.type != "cpu" or dtype == torch.float32 or torch.compiler.is_compiling():
        wide = _levels(kind, rows, levels).mul_(factors).to(dtype)
    else:
        wide = torch.empty((len(rows), levels.shape[1] * rows.shape[1] or rows.shape[1]), dtype=dtype)
        for these in _chunks(wide):
            wide[these] = _levels(kind, rows[these], levels).mul_(factors if len(factors) == 1 else factors[these])
    return wide.flatten()


def _levels(kind: str, rows: Tensor, levels: Tensor) -> Tensor:
    """Return what codes stand for, in fp32, before it is scaled. Shapes: (rows, codes) -> (rows, numbers)."""
    if kind == "int8":
        return rows.to(torch.float32)
    if kind == "fp8" and rows.device.type != "cpu":  # where a look-up is faster than the cast of this dtype
        return rows.view(FP8).to(torch.float32)
    table = levels.squeeze(1)  # a row of one number is slower to look up than a number
    return table.index_select(0, rows.flatten().int()).view(len(rows), -1)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Cut rows into pieces that stay in a core's cache between two operations; on other devices not at all."""
    step = max(1, _CHUNK // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
    return (slice(first, first + step) for first in range(0, len(rows), step))


def levels_of(kind: str) -> Tensor:
    """Return what each byte stands for; nothing of kinds whose codes are numbers."""
    if kind == "fp8":  # the two codes that are no number are refused where a file is read
        return torch.arange(256).to(torch.uint8).view(FP8).float().nan_to_num(0.0)[:, None]
    if kind != "nf4":
        return torch.empty(256, 0)
    levels = torch.tensor(NF4)
    return torch.stack((levels.repeat_interleave(len(levels)), levels.repeat(len(levels))), 1)


# --- Layers, changed in place: those of a module that has weights, or hollow ones that take theirs one at a time


def store(module: nn.Module) -> list[str]:
    """Put the frozen linear and convolution layers inside a module into fp8, in place; return their names.

    What they were made of stays on the host, and is what a state dict gives: exports and checkpoints lose nothing.
    """
    layers = {name: layer for name, layer in module.named_modules() if fits(layer, "fp8", fewest=FEWEST_INPUTS)}
    for layer in layers.values():
        original = layer.weight.detach()  # type: ignore[operator, union-attr]
        hollow([layer], "fp8", original.dtype)
        layer.__dict__["original"] = original  # no parameter and no buffer: it stays on the host
        layer.take(original)  # type: ignore[operator]
    return list(layers)


def hollow(layers: Iterable[nn.Module], kind: Kind, dtype: torch.dtype) -> None:
    """Make layers such that store their weight in few bits, without memory until each takes its own.

    dtype: that the weights would have, for those who read shapes and dtypes off a state dict, which has no values.
    """
    for layer in layers:
        layer.__class__ = _KINDS[type(layer)]
        assert isinstance(layer, QuantisedLayer)
        layer.kind, layer.wide_dtype = kind, dtype
        with torch.device("meta"):
            codes, scale = encode(kind, torch.empty(layer.wide_shape))
        layer.weight = nn.Parameter(codes, requires_grad=False)
        layer.register_buffer("scale", scale, persistent=False)
        layer.register_buffer("levels", levels_of(kind), persistent=False)


def refresh(module: nn.Module) -> None:
    """Round anew what has been written into the state dict's tensors."""
    for layer in layers_of(module):
        layer.round_again()


def layers_of(module: nn.Module) -> Iterator[QuantisedLayer]:
    """Yield the layers inside a module whose weight is in few bits."""
    return (layer for layer in module.modules() if isinstance(layer, QuantisedLayer))


def stored_names(module: nn.Module) -> Iterator[str]:
    """Name the parameters and buffers that hold weights in few bits."""
    for name, layer in module.named_modules():
        if isinstance(layer, QuantisedLayer):
            yield from (f"{name}.{own}".lstrip(".") for own in ("weight", "scale", "levels"))


def count_parameters(module: nn.Module) -> int:
    """Count the weights of a module, also those of which several share a byte."""
    packed = sum(layer.wide_shape.numel() - layer.weight.numel() for layer in layers_of(module))
    return sum(parameter.numel() for parameter in module.parameters()) + packed


def scale_bytes(module: nn.Module) -> int:
    """Return the bytes of what stands beside codes."""
    return sum(4 * (layer.scale.numel() + layer.levels.numel()) for layer in layers_of(module))


def fits(layer: Any, kind: str, *, fewest: int = 1) -> bool:
    """Tell whether a layer can be stored so: a frozen linear one, of bf16 and fp8 a convolution too. fewest: inputs."""
    if type(layer) not in _KINDS or any(param.requires_grad for param in layer.parameters(recurse=False)):
        return False
    if isinstance(layer, nn.Conv2d):
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return plain and kind in ("bf16", "fp8") and bool(layer.weight[0].numel() >= fewest)
    return bool(layer.in_features >= fewest)


class QuantisedLayer(nn.Module):
    """What the kinds of layers share. weight: its codes."""

    weight: Any
    bias: Any
    scale: Tensor
    levels: Tensor
    kind: Kind
    wide_dtype: torch.dtype

    @property
    def wide_shape(self) -> torch.Size:
        """Return the shape of the weight."""
        raise NotImplementedError

    @torch.no_grad()
    def take(self, value: Tensor | Stored, *, mapped: bool = False) -> None:
        """Store a weight. mapped: its memory may be that of its file, where it lies there as it is kept."""
        shape = value.codes.shape if isinstance(value, Stored) else value.shape
        if shape != self.wide_shape:
            raise ValueError(f"the weight has the shape {tuple(shape)}, not {tuple(self.wide_shape)}")
        if isinstance(value, Stored) and self.kind == "fp8":
            scale = value.scale.float()
            codes, scale = value.codes.contiguous().view(torch.uint8), scale.view(-1, *(1,) * (len(shape) - 1)).clone()
        else:
            codes, scale = encode(self.kind, value.wide() if isinstance(value, Stored) else value.detach())
        if self._is_view(codes, value) and not mapped:
            codes = codes.clone()
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale, self.levels = scale, levels_of(self.kind)

    @staticmethod
    def _is_view(codes: Tensor, value: Tensor | Stored) -> bool:
        source = value.codes if isinstance(value, Stored) else value
        return codes.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that the layer computes with."""
        return decode(self.kind, self.wide_shape, dtype, self.weight, self.scale, self.levels)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # buffers go as integers: they are moved, and never cast
        for name in ("scale", "levels"):
            self._buffers[name] = self._buffers[name].view(torch.int32)  # type: ignore[union-attr]
        super()._apply(fn, recurse)
        for name in ("scale", "levels"):
            self._buffers[name] = self._buffers[name].view(torch.float32)  # type: ignore[union-attr]
        if self.weight.is_meta and "original" in self.__dict__:  # the layer gives its memory back
            self.__dict__["original"] = self.__dict__["original"].to("meta")
        return self

    @torch.no_grad()
    def round_again(self) -> None:
        """Round anew what the layer was made of, where that is kept."""
        if "original" in self.__dict__:
            codes, scale = encode(self.kind, self.__dict__["original"])
            self.weight.copy_(codes)
            self.scale.copy_(scale)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        wide = self.__dict__.get("original")
        if wide is None:  # shape and dtype: values are read from their source, where somebody wants them
            wide = torch.empty(self.wide_shape, dtype=self.wide_dtype, device="meta")
        destination[f"{prefix}weight"] = wide

    def _ready(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return input and bias in the dtype to compute in: autocast's, else the input's."""
        kind = x.device.type
        casts = not x.is_meta and torch.is_autocast_enabled(
            kind
        )  # of the meta device nobody knows: it computes nothing
        dtype = torch.get_autocast_dtype(kind) if casts else x.dtype
        return x.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def _stored(self) -> tuple[str, torch.Size, Tensor, Tensor, Tensor]:
        return self.kind, self.wide_shape, self.weight, self.scale, self.levels


class QuantisedLinear(QuantisedLayer, nn.Linear):
    """A frozen linear layer."""

    @property
    def wide_shape(self) -> torch.Size:
        """Return the shape of the weight."""
        return torch.Size((self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self._ready(x)
        return _Linear.apply(x, bias, *self._stored())  # type: ignore[no-any-return]


class QuantisedConv2d(QuantisedLayer, nn.Conv2d):
    """A frozen convolution."""

    @property
    def wide_shape(self) -> torch.Size:
        """Return the shape of the weight."""
        return torch.Size((self.out_channels, self.in_channels // self.groups, *self.kernel_size))

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self._ready(x)
        how = (self.stride, self.padding, self.dilation, self.groups)
        return _Conv2d.apply(x, bias, how, *self._stored())  # type: ignore[no-any-return]


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: QuantisedLinear, nn.Conv2d: QuantisedConv2d}


class _Linear(torch.autograd.Function):
    """x W' + b, keeping the codes for the backward pass instead of the wide weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: str, shape: torch.Size, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.form = kind, shape
        return F.linear(x, decode(kind, shape, x.dtype, *stored), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kind, shape = ctx.form
        return grad @ decode(kind, shape, grad.dtype, *ctx.saved_tensors), *(None,) * 6


class _Conv2d(torch.autograd.Function):
    """The same for a convolution. how: stride, padding, dilation, groups."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, how: Any, kind: str, shape: torch.Size, *stored: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.form, ctx.how, ctx.shape = (kind, shape), how, x.shape
        return F.conv2d(x, decode(kind, shape, x.dtype, *stored), bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kind, shape = ctx.form
        wide = decode(kind, shape, grad.dtype, *ctx.saved_tensors)
        return conv2d_input(ctx.shape, wide, grad, *ctx.how), *(None,) * 7
