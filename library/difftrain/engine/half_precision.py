"""The ways in which the fp32 value of a half weight is kept between updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from difftrain.diffusion.draws import words_of
from difftrain.engine.master_weights import DTYPES, HalfPrecisionWeights, MasterWeights

if TYPE_CHECKING:
    from difftrain.config.schema.sections import TrainingSection


def weights_kept(section: TrainingSection) -> str:
    """Return what is kept of trained weights between updates: fp32, kahan, stochastic or none."""
    return section.master_weights or {None: "fp32", "bf16": "kahan", "fp16": "none"}[section.full_precision]


def precision_of(section: TrainingSection) -> str:
    """Say in which precision a run trains: fp32 is called no, as its flag does."""
    if section.full_precision is None:
        return section.mixed_precision
    return (
        f"{section.full_precision} with weights in {section.full_precision} (kept in addition: {weights_kept(section)})"
    )


def make_master_weights(
    root: nn.Module, trained: Mapping[str, nn.Parameter], section: TrainingSection
) -> MasterWeights:
    """Make what the optimizer will update; in full half precision the weights of root become half ones, in place."""
    if section.full_precision is None:
        return MasterWeights(trained)
    dtype = DTYPES[section.full_precision]
    kept = weights_kept(section)
    for parameter in root.parameters():  # frozen ones, and all of them where nothing is kept
        if (kept == "none" or not parameter.requires_grad) and parameter.dtype == torch.float32:
            parameter.data = parameter.detach().to(dtype)
    if kept == "none":
        return MasterWeights(trained)
    if kept == "stochastic":
        return StochasticWeights(trained, dtype, section.seed or 0)
    return {"fp32": Fp32Masters, "kahan": KahanWeights}[kept](trained, dtype)


class Fp32Masters(HalfPrecisionWeights):
    """Keep fp32 masters: the optimizer's parameters are them."""

    def _to_fp32(self, name: str) -> None:
        pass

    def _to_half(self, name: str) -> None:
        nearest(self.updated[name].detach(), self.weights[name].detach())

    def _broadcast_tensors(self, name: str) -> list[Tensor]:
        return [self.updated[name].detach()]

    def _after_broadcast(self, names: Iterable[str]) -> None:
        for name in names:
            self._to_half(name)

    def _fp32_copy(self, name: str) -> Tensor:
        return self.updated[name].detach()


class KahanWeights(HalfPrecisionWeights):
    """Keep the 16 bits that bf16 lacks (Kahan's compensation, exact): updates are those of fp32 masters, bit by bit."""

    def __init__(self, weights: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self._low: dict[str, Tensor] = {}
        super().__init__(weights, dtype)

    def _init_kept(self, name: str) -> None:
        self._low[name] = torch.empty_like(self.weights[name], dtype=torch.int16, requires_grad=False)

    def _to_fp32(self, name: str) -> None:
        join(self.weights[name].detach(), self._low[name], self._allocate(name))

    def _to_half(self, name: str) -> None:
        split(self.updated[name].detach(), self.weights[name].detach(), self._low[name])
        self._release(name)

    def _broadcast_tensors(self, name: str) -> list[Tensor]:
        return [self.weights[name].detach(), self._low[name]]


class StochasticWeights(HalfPrecisionWeights):
    """Keep nothing: an update rounds to one of two neighbours by chance, so that small ones count in the mean.

    The chance is a function of (seed, update, parameter, element); a value that bf16 holds stays as it is.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], dtype: torch.dtype, seed: int) -> None:
        self.seed = seed
        super().__init__(weights, dtype)

    def _init_kept(self, name: str) -> None:
        """Begin with the nearest: the first rounding is no update."""
        value = self.updated[name].detach()
        value.copy_(nearest(value, torch.empty_like(value, dtype=self.weights[name].dtype)))

    def _to_fp32(self, name: str) -> None:
        self._allocate(name).copy_(self.weights[name].detach())

    def _to_half(self, name: str) -> None:
        value = self.updated[name].detach()
        by_chance(value, self.weights[name].detach(), self.seed, self.position, name)
        self._release(name)


# --- fp32 values in 16 bits and back: two halves without loss, the nearest bf16, or a bf16 by chance
# The lower half of an fp32 number is what bf16 lacks. Kept beside the weight as a signed 16-bit integer it makes a
# compensated sum of bf16 numbers exact: weight and compensation ARE the fp32 value, in the same four bytes.


_HALF, _HIGH = 1 << 15, -(1 << 16)  # half of the last place of bf16; the bits that bf16 keeps
_MIX = (
    (16, 0x7FEB352D),
    (15, 0x846CA68B - (1 << 32)),
)  # a bijection of 32 bits whose outputs look random (Wellons' lowbias32)


@torch.no_grad()
def split(value: Tensor, high: Tensor, low: Tensor) -> None:
    """Write the nearest bf16 of every fp32 value into `high`, and value - high in units of fp32's last place into `low`.

    Shapes: all alike; dtypes fp32, bf16, int16. Halfway cases go away from zero, so that `low` always fits.
    """
    bits = value.view(torch.int32)
    # to nearest by integer arithmetic, which every device does alike
    upper = (bits + _HALF) >> 16
    high.view(torch.int16).copy_(upper)
    # between -2^15 and 2^15 - 1, since upper is the nearest
    low.copy_(bits - (upper << 16))


@torch.no_grad()
def join(high: Tensor, low: Tensor, out: Tensor) -> Tensor:
    """Write the fp32 values that `split` was given into `out`, bit by bit, and return it."""
    bits = out.view(torch.int32)
    bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)
    return out


@torch.no_grad()
def nearest(value: Tensor, out: Tensor) -> Tensor:
    """Round fp32 values to the dtype of `out`; to bf16 as `split` does."""
    if out.dtype != torch.bfloat16:
        return out.copy_(value)
    out.view(torch.int16).copy_((value.view(torch.int32) + _HALF) >> 16)
    return out


@torch.no_grad()
def by_chance(value: Tensor, out: Tensor, seed: int, step: int, name: str, offset: int = 0) -> Tensor:
    """Round fp32 values to one of the two bf16 neighbours, to the nearer one with the larger chance: the mean is right.

    offset: of the first element in the whole parameter, so that a shard draws what the whole would.
    """
    # add 16 random bits below the last place of bf16, then cut: the carry comes with the right probability
    flat = value.contiguous().view(torch.int32).reshape(-1)
    bits = random_bits(seed, step, name, offset, len(flat), value.device).bitwise_and_(~_HIGH)
    rounded = bits.add_(flat).bitwise_and_(_HIGH).view(torch.float32)
    return out.copy_(rounded.view(value.shape))  # exact: what bf16 cannot hold is zero


def random_bits(seed: int, step: int, name: str, offset: int, count: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each element of a parameter: a function of the arguments alone, alike on every device.

    Made where they are used: a step of a large model takes gigabytes of them. Integer arithmetic, so bit-equal
    everywhere; two rounds, each with a key word, over the element's number. Shape: (count,) int32.
    """
    word = words_of("rounding", seed, step, name, count=1)[0]
    bits = torch.arange(offset, offset + count, device=device, dtype=torch.int32)
    for key in (word >> 32, word & 0xFFFFFFFF):
        bits.bitwise_xor_(key - (1 << 32) if key >> 31 else key)
        _mix(bits)
    return bits


def _mix(bits: Tensor) -> None:
    """Stir 32-bit words in place."""
    for shift, factor in _MIX:
        _fold(bits, shift)
        bits.mul_(factor)
    _fold(bits, 16)


def _fold(bits: Tensor, shift: int) -> None:
    """Do bits ^= bits >> shift as for unsigned words: shifts of signed ones bring in the sign, which is masked off."""
    bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
