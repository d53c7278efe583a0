"""Keyed permutations: bijective at every size, the same for ever, uniform, fast."""

from __future__ import annotations

import hashlib
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftrain.diffusion.permutation import Permutation


def test_golden_values() -> None:
    golden = {
        5: [3, 1, 0, 2, 4],
        127: [77, 64, 35, 53, 69, 103],
        128: [35, 67, 37, 77, 107, 98],
        1000: [241, 643, 838, 434, 815, 429],
        10**6: [7436, 42698, 858214, 56580, 870858, 806924],
        10**10: [810529785, 8856311606, 6322491144, 3102266785, 6719328197, 7330815433],
        10**14: [2212089878575, 91600796800781, 62198235717679, 56363910286447, 90344073168946, 3322982129866],
    }
    for n, first in golden.items():
        assert [Permutation(n, "g", 1)(i) for i in range(len(first))] == first
    whole = Permutation(10**6, "g", 1)(np.arange(10**6)).astype("<i8")
    assert (
        hashlib.sha256(whole.tobytes()).hexdigest()
        == "5dc43f2b5c13b252e20a64562c6fd3aa195a10eef855b578a8ad6e73c851e7a4"
    )


@pytest.mark.parametrize("key", [0, 1])
def test_every_small_size_is_a_bijection(key: int) -> None:
    for n in range(1, 301):
        assert np.array_equal(np.sort(Permutation(n, key)(np.arange(n))), np.arange(n)), n


@pytest.mark.parametrize("n", [1023, 1024, 1025, 65_536, 99_999, 1_000_003])
def test_larger_sizes_are_bijections(n: int) -> None:
    assert np.bincount(Permutation(n, "big")(np.arange(n)), minlength=n).tolist().count(1) == n


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**48), st.integers(0, 2**63), st.data())
def test_one_by_one_equals_many_at_once(n: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(n, key)
    some = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    many = permutation(np.array(some))
    assert many.dtype == np.int64 and many.tolist() == [permutation(i) for i in some]
    assert len(set(many.tolist())) == len(some)
    assert many.min() >= 0 and many.max() < n


def test_shapes_are_kept_and_bad_places_refused() -> None:
    permutation = Permutation(1000, "x")
    grid = np.arange(60).reshape(3, 4, 5)
    assert permutation(grid).shape == (3, 4, 5)
    assert np.array_equal(permutation(grid.T), permutation(grid).T)
    assert permutation(np.array([], dtype=np.int64)).size == 0
    assert np.array_equal(grid.ravel(), np.arange(60))  # the argument is left alone
    for wrong in (-1, 1000):
        with pytest.raises(IndexError):
            permutation(wrong)
        with pytest.raises(IndexError):
            permutation(np.array([3, wrong]))
    for n in (0, -5, 2**49):
        with pytest.raises(ValueError, match="1 <= n"):
            Permutation(n, "x")


def test_keys_differ() -> None:
    orders = {
        tuple(Permutation(300, *parts)(np.arange(300))) for parts in [(1, 0), (1, 1), (10,), ("1", 0), (b"1", 0), ()]
    }
    assert len(orders) == 6


def _excess(counts: np.ndarray) -> float:
    """Standard deviations by which chi squared exceeds its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [50, 131, 300])
def test_places_and_distances_are_uniform_over_keys(n: int) -> None:
    orders = np.array([Permutation(n, "uniform", key)(np.arange(4)) for key in range(4000)])
    for place in range(4):
        assert _excess(np.bincount(orders[:, place], minlength=n)) < 4
        if place:
            apart = (orders[:, place] - orders[:, 0]) % n
            assert _excess(np.bincount(apart, minlength=n)[1:]) < 4
    second = (orders[:, 3] - orders[:, 2] - orders[:, 1] + orders[:, 0]) % n
    assert _excess(np.bincount(second, minlength=n)) < 4


def test_an_order_has_no_echo() -> None:
    n = 1_000_000
    order = Permutation(n, "echo")(np.arange(n)).astype(np.float64) / n - 0.5
    for lag in (1, 2, 7, 999, 1000, 1001):
        assert abs((order[:-lag] * order[lag:]).mean() * 12) < 4.5 / math.sqrt(n)


def test_a_batch_of_64_among_ten_million_takes_well_under_a_millisecond() -> None:
    def timed(action) -> float:
        best = math.inf
        for _ in range(20):
            start = time.perf_counter()
            action()
            best = min(best, time.perf_counter() - start)
        return best

    places = np.arange(64) + 123_456
    assert timed(lambda: Permutation(10_000_000, 1, "bucket", 0)(places)) < 0.5e-3
    permutation = Permutation(10_000_000, 1)
    assert timed(lambda: permutation(77)) < 0.1e-3
