"""fp32 in two halves, and rounding by chance: exact, and the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from difftrain.diffusion.draws import words_of
from difftrain.diffusion.rounding import by_chance, join, nearest, random_bits, split

CPU = torch.device("cpu")


def numbers(count: int = 200_000) -> torch.Tensor:
    """fp32 of every exponent and sign that bf16 can round, subnormal ones and exact ties among them."""
    bits = np.random.Generator(np.random.Philox(7)).integers(0, 1 << 32, count, dtype=np.uint32)
    bits[::50] = bits[::50] & 0xFFFF0000 | 0x8000  # halfway between two bf16
    bits[1::50] &= 0xFFFF0000
    bits[2::50] &= 0x807FFFFF  # subnormal
    values = torch.from_numpy(bits.view(np.float32).copy())
    return values[values.abs() < 3.38e38]


def test_two_halves_are_the_whole_bit_by_bit():
    value = numbers()
    high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    split(value, high, low)
    assert torch.equal(join(high, low, torch.empty_like(value)).view(torch.int32), value.view(torch.int32))
    assert torch.equal(nearest(value, torch.empty_like(high)).view(torch.int16), high.view(torch.int16))
    tie = value.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(high[~tie], value.to(torch.bfloat16)[~tie]) and tie.sum() > 1000
    assert (high[tie].float().abs() > value[tie].abs()).all()  # away from zero


def test_halves_keep_the_layout_of_their_tensor():
    value = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    split(value, high, low)
    back = join(high, low, torch.empty_like(value))
    assert torch.equal(back, value) and back.stride() == value.stride()
    assert torch.equal(nearest(value, torch.empty_like(value, dtype=torch.float16)), value.half())


def reference(seed: int, step: int, name: str, offset: int, count: int) -> np.ndarray:
    """The same bits, in unsigned numbers as one would write them."""
    word = words_of("rounding", seed, step, name, count=1)[0]
    bits = np.arange(offset, offset + count, dtype=np.uint64)
    for key in (word >> 32, word & 0xFFFFFFFF):
        bits ^= np.uint64(key)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits ^= bits >> np.uint64(shift)
            bits = bits * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return bits


@pytest.mark.parametrize(
    ("seed", "step", "name", "offset"), [(0, 0, "a", 0), (3, 10**6, "unet.x.weight", 12345), (2**62, 1, "", 5)]
)
def test_random_bits_are_a_function_of_their_arguments(seed, step, name, offset):
    found = random_bits(seed, step, name, offset, 5000, CPU).numpy().astype(np.int64) & 0xFFFFFFFF
    assert (found == reference(seed, step, name, offset, 5000).astype(np.int64)).all()


def test_random_bits_are_these():
    """Committed figures: another machine or version that draws others would train others."""
    assert random_bits(1, 2, "unet.conv_in.weight", 0, 4, CPU).tolist() == [
        2073635879,
        515160105,
        917457885,
        -344666791,
    ]


def test_random_bits_look_random_and_differ_by_every_argument():
    one = random_bits(1, 2, "x", 0, 1 << 16, CPU)
    ones = torch.stack([(one >> bit & 1).float().mean() for bit in range(32)])
    assert (ones - 0.5).abs().max() < 0.01
    others = [
        random_bits(*key, 1 << 16, CPU) for key in ((2, 2, "x", 0), (1, 3, "x", 0), (1, 2, "y", 0), (1, 2, "x", 1))
    ]
    for other in others:
        assert (one == other).float().mean() < 1e-3
        share = (one.bitwise_xor(other) >> 15 & 1).float().mean()
        assert abs(share - 0.5) < 0.01
    assert torch.equal(random_bits(1, 2, "x", 100, 50, CPU), one[100:150])  # a shard draws what the whole would


def test_rounding_by_chance_takes_a_neighbour_and_is_right_in_the_mean():
    value = torch.tensor([1.0 + k / 2**11 for k in range(16)] + [-3.1, 1e-3, -7e-30, 2.5e30]).repeat(20_000, 1)
    out = torch.empty_like(value, dtype=torch.bfloat16)
    by_chance(value, out, seed=1, step=0, name="w")
    down = (value[0].view(torch.int32) & -65536).view(torch.float32)
    up = ((value[0].view(torch.int32) & -65536) + 65536).view(torch.float32)
    exact = down == value[0]
    assert torch.equal(out[:, exact].float(), value[:, exact]) and exact.sum() >= 1
    assert ((out.float() == down) | (out.float() == up)).all()
    share = (out.float() == up).float().mean(0)
    wanted = (value[0].double() - down) / (up.double() - down)
    assert (share - wanted).abs().max() < 0.015  # four standard deviations of 20,000 draws
    again = by_chance(value, torch.empty_like(out), seed=1, step=0, name="w")
    assert torch.equal(again, out)
    assert not torch.equal(by_chance(value, torch.empty_like(out), seed=1, step=1, name="w"), out)
