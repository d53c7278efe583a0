"""Features as stored bytes: what comes back is what went in, to the precision of how it was stored, or it is refused."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difftrain.cache.store.format import pack, unpack
from difftrain.cache.store.storage import FP8_MAX, Unstorable, kept_rows, nbytes_of, restore, stored

SHAPES = [(9,), (1,), (5, 7), (1, 3), (3, 4, 6), (2, 3, 4, 5), (2, 1, 2, 3, 1, 2)]
FP8 = "float8_e4m3fn"
DTYPES = ["float32", "bfloat16", "float16", FP8]
EXACT = settings(max_examples=150, deadline=None)


def through(value: torch.Tensor, dtype: str, out: torch.dtype, rows: int | None = None) -> torch.Tensor:
    """Store and restore a feature, through the bytes of a payload."""
    pieces = pack([stored("other", torch.ones(3), "float32"), stored("x", value, dtype, rows)], {"name": "a"})
    payload = np.frombuffer(b"".join(bytes(piece) for piece in pieces), np.uint8).copy()
    _, one = unpack(payload)
    made = torch.full(value.shape, 77).to(out)
    restore(one, made)
    return made


def scales_of(value: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each row over 448, beside the values of that row."""
    rows = value.reshape(1, -1) if value.dim() == 1 else value.reshape(len(value), -1)
    most = rows.double().abs().amax(1) / FP8_MAX
    return most.view(-1, *[1] * (value.dim() - 1)).expand(value.shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_float_comes_back_as_torch_rounds_it(shape, dtype):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 30
    assert torch.equal(through(value, dtype, torch.float32), value.to(getattr(torch, dtype)).float())
    same = value.to(getattr(torch, dtype))
    assert torch.equal(through(same, dtype, same.dtype), same), "and one that has that dtype bit by bit"


@pytest.mark.parametrize("shape", SHAPES)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-37, 37), spread=st.floats(0, 12))
@EXACT
def test_eight_bits_are_within_a_sixteenth_or_a_thousandth_of_the_largest(shape, seed, exponent, spread):
    """Three bits of mantissa round by 2^-4 of a value at most; below 2^-6 of the scale steps are 2^-9, half of it is lost."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
    value = (torch.randn(shape, generator=generator).double() * wide.exp2() * 10.0**exponent).clamp(-3e38, 3e38).float()
    made = through(value, FP8, torch.float32).double()
    bound = torch.maximum(value.double().abs() / 16, scales_of(value).clamp_min(2.0**-126) * 2.0**-10)
    assert torch.isfinite(made).all()
    assert ((made - value.double()).abs() <= bound * (1 + 1e-5)).all()


def test_eight_bits_are_what_torch_makes_of_them():
    """All 254 numbers of the format, decoded without torch's own conversion."""
    raw = torch.arange(256, dtype=torch.uint8)
    raw = raw[(raw & 0x7F) != 0x7F]
    every = raw.view(torch.float8_e4m3fn).float()
    assert torch.equal(through(every, FP8, torch.float32), every), "the largest is 448, so the scale is 1"
    assert torch.equal(through(every, FP8, torch.bfloat16).float(), every), "three bits of mantissa fit into bfloat16"


@pytest.mark.parametrize("largest", [3.4028234663852886e38, 448.0, 1e-30, 1.2e-38, 1e-42, 1.4e-45])
def test_the_largest_of_a_row_never_overflows(largest):
    value = torch.tensor([[largest, -largest, largest / 2], [0.0, 0.0, 0.0]])
    made = through(value, FP8, torch.float32)
    assert torch.isfinite(made).all() and (made.abs() <= value.abs().amax()).all()
    assert torch.equal(made[1], torch.zeros(3)), "a row of zeros stays one"
    if largest > 1e-30:
        assert torch.allclose(made, value, rtol=1e-6)


def test_each_row_has_a_scale_of_its_own_and_a_vector_one():
    value = torch.tensor([[1e-6, 2e-6], [1e6, 2e6]])
    one = stored("x", value, FP8)
    assert one.scales is not None and one.scales.shape == (2,) and one.data.nbytes == 4
    assert torch.allclose(through(value, FP8, torch.float32), value, rtol=1 / 16)
    vector = stored("x", value.flatten(), FP8)
    assert vector.scales is not None and vector.scales.shape == (1,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 4, 7])
def test_rows_behind_the_mask_are_not_stored_and_come_back_as_zeros(dtype, rows):
    value = torch.randn(7, 5, generator=torch.Generator().manual_seed(2))
    value[rows:] = 0
    one = stored("x", value, dtype, rows)
    assert one.data.nbytes == nbytes_of(dtype, (7, 5), rows) == rows * 5 * getattr(torch, dtype).itemsize
    made = through(value, dtype, torch.float32, rows)
    assert torch.equal(made, through(value, dtype, torch.float32)) and not made[rows:].any()


def test_rows_behind_the_mask_that_are_no_zeros_are_not_lost():
    value = torch.ones(4, 2)
    with pytest.raises(Unstorable, match=r"t5: rows .* 3 .*zeros"):
        stored("t5", value, "bfloat16", 3)


@pytest.mark.parametrize(("mask", "rows"), [([1, 1, 0, 0], 2), ([0, 0], 0), ([0, 1, 0], 2), ([1, 1], 2)])
def test_the_last_token_that_a_mask_keeps_decides(mask, rows):
    assert kept_rows(torch.tensor(mask)) == rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(dtype, bad):
    value = torch.zeros(3, 4, dtype=torch.float32)
    value[1, 2] = value[2, 0] = bad
    with pytest.raises(Unstorable, match=r"latents: 2 of 12 values .*finite, .*\[1, 2\]"):
        stored("latents", value, dtype)


@pytest.mark.parametrize(("dtype", "largest", "remedy"), [("float16", 7e4, "bf16"), ("bfloat16", 3.4e38, "fp32")])
def test_what_is_too_large_for_a_dtype_is_named(dtype, largest, remedy):
    with pytest.raises(Unstorable, match=f"hidden_2: .* too large .*{dtype}.*{remedy}"):
        stored("hidden_2", torch.tensor([1.0, -largest]), dtype)


@given(seed=st.integers(0, 99), height=st.integers(1, 40), width=st.integers(1, 40), values=st.integers(1, 256))
@EXACT
def test_a_mask_comes_back_bit_by_bit(seed, height, width, values):
    mask = torch.randint(0, values, (1, height, width), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    assert torch.equal(through(mask, "uint8", torch.uint8), mask)


def test_a_plain_mask_takes_next_to_nothing():
    assert stored("mask", torch.full((1, 1024, 1024), 255, dtype=torch.uint8), "uint8").data.nbytes < 2048


def test_bytes_that_are_too_few_or_too_many_are_refused():
    one = stored("x", torch.ones(4, 4), "bfloat16")
    out = torch.empty(4, 4)
    with pytest.raises(ValueError, match="x has 31 bytes, not 32"):
        restore(type(one)(one.name, one.dtype, one.shape, 4, one.data[:31]), out)
    with pytest.raises(ValueError, match=r"shape \(4, 4\), not \(4, 5\)"):
        restore(one, torch.empty(4, 5))
    bomb = np.frombuffer(zlib.compress(bytes(1 << 24)), np.uint8)
    with pytest.raises(ValueError, match="x has 17 bytes, not 16"):
        restore(type(one)("x", "uint8", (4, 4), 4, bomb, None, "zlib"), torch.empty(4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="decompressed"):
        restore(type(one)("x", "uint8", (4, 4), 4, bomb[5:], None, "zlib"), torch.empty(4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="'brotli'"):
        restore(type(one)("x", "uint8", (4, 4), 4, bomb, None, "brotli"), torch.empty(4, 4, dtype=torch.uint8))
