"""fp32 values in 16 bits and back: two halves without loss, the nearest bf16, or a bf16 by chance.

The lower half of an fp32 number is what bf16 lacks. Kept beside the weight as a signed 16-bit integer it makes a
compensated sum of bf16 numbers exact: weight and compensation ARE the fp32 value, in the same four bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from difftrain.diffusion.draws import words_of

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
