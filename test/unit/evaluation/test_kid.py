"""The kernel distance against sums written out, closed cases, and what an unbiased estimate promises."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difftrain.evaluation.kid import Kid, kernel, kid, mmd2


def written_out(x: list[list[float]], y: list[list[float]], paired: bool) -> float:
    """Lemma 6 (or equation 4, for pairs) of Gretton et al., term by term."""
    d = len(x[0])

    def k(a: list[float], b: list[float]) -> float:
        return (sum(p * q for p, q in zip(a, b, strict=True)) / d + 1) ** 3

    m, n = len(x), len(y)
    if paired:
        terms = (
            k(x[i], x[j]) + k(y[i], y[j]) - k(x[i], y[j]) - k(x[j], y[i])
            for i, j in itertools.permutations(range(m), 2)
        )
        return math.fsum(terms) / (m * (m - 1))
    own = math.fsum(k(x[i], x[j]) for i, j in itertools.permutations(range(m), 2)) / (m * (m - 1))
    own += math.fsum(k(y[i], y[j]) for i, j in itertools.permutations(range(n), 2)) / (n * (n - 1))
    return own - 2 * math.fsum(k(a, b) for a in x for b in y) / (m * n)


def points(count: int, width: int) -> st.SearchStrategy[list[list[float]]]:
    number = st.floats(-3, 3, allow_nan=False)
    return st.lists(st.lists(number, min_size=width, max_size=width), min_size=count, max_size=count)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_the_estimate_is_the_sum_of_the_paper(m: int, n: int, width: int, data: st.DataObject) -> None:
    x, y = data.draw(points(m, width)), data.draw(points(n, width))
    found = mmd2(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64))
    assert found == pytest.approx(written_out(x, y, False), abs=1e-9)
    if m == n:
        found = mmd2(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64), paired=True)
        assert found == pytest.approx(written_out(x, y, True), abs=1e-9)


def test_closed_cases() -> None:
    zero, one = torch.zeros(4, 5), torch.ones(6, 5)
    assert mmd2(zero, one) == 1 + 8 - 2 * 1  # k(0, 0) = 1, k(1, 1) = 2^3, k(0, 1) = 1
    assert mmd2(one, one) == 0 and mmd2(one, one, paired=True) == 0
    assert mmd2(zero, -one[:4], paired=True) == 7
    assert kernel(torch.full((1, 2), 2.0), torch.full((1, 2), 3.0)).item() == 7**3


def test_fp32_features_are_summed_in_fp64() -> None:
    x = torch.randn(40, 1280, generator=torch.Generator().manual_seed(1)) * 3
    assert kernel(x, x).dtype == torch.float64
    assert mmd2(x, x + 1e-3) == mmd2(x.double(), (x + 1e-3).double())


def test_the_estimate_is_unbiased_and_its_error_is_that_of_repetition() -> None:
    """Two normals of known kernel distance: the mean over many repetitions is it, for pairs that belong together too."""
    generator = torch.Generator().manual_seed(7)
    shift, repetitions, count = 0.8, 400, 30
    truth = known(0.0) + known(shift) - 2 * known_between(shift)
    values, paired, errors = [], [], []
    for _ in range(repetitions):
        x, noise = torch.randn(2, count, 1, generator=generator, dtype=torch.float64)
        together = 0.9 * x + math.sqrt(1 - 0.81) * noise + shift  # y is N(shift, 1), and close to its x
        apart = torch.randn(count, 1, generator=generator, dtype=torch.float64) + shift
        found = kid(x, apart, blocks=3)
        values.append(found.value)
        errors.append(found.error)
        paired.append(mmd2(x, together, paired=True))
    for found in (values, paired):
        sample = torch.tensor(found)
        error = float(sample.std()) / math.sqrt(repetitions)
        assert abs(float(sample.mean()) - truth) < 4 * error, (float(sample.mean()), truth, error)
    spread = float(torch.tensor(values).std())
    # the error is the blocks' mean's, which varies more than the whole: no less than the spread, and of its size
    assert 0.9 * spread < math.sqrt(sum(e * e for e in errors) / repetitions) < 3 * spread


def known(mean: float) -> float:
    """E (x x' + 1)^3 of two independent draws of N(mean, 1)."""
    first, second, third = mean, mean**2 + 1, mean**3 + 3 * mean
    return third**2 + 3 * second**2 + 3 * first**2 + 1


def known_between(mean: float) -> float:
    """The same of a draw of N(0, 1) and one of N(mean, 1)."""
    return 3 * (mean**2 + 1) + 1


def test_alike_and_apart() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(100, 16, generator=generator) for _ in range(2))
    same, far = kid(x, y), kid(x, y + 0.5)
    assert abs(same.value) < 4 * same.error and far.value > 4 * far.error > 4 * same.error
    assert same.pictures == 100 and same.blocks == 10


def test_few_pictures_have_a_value_and_no_error() -> None:
    x, y = torch.randn(6, 4), torch.randn(9, 4)
    found = kid(x, y)
    assert isinstance(found, Kid) and math.isnan(found.error) and found.pictures == 6 and found.blocks == 0
    assert kid(torch.randn(12, 4), torch.randn(40, 4)).blocks == 2


@pytest.mark.parametrize(("m", "n"), [(1, 5), (5, 1), (0, 0)])
def test_too_few_pictures_are_refused(m: int, n: int) -> None:
    with pytest.raises(ValueError, match=f" 2 .* {m} and {n}$"):
        mmd2(torch.randn(m, 3), torch.randn(n, 3))


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match=r"4 and 5 .*pairs"):
        mmd2(torch.randn(4, 3), torch.randn(5, 3), paired=True)
