"""Averages by relative width: their closed form, and others made from stored ones against those tracked directly."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from difftrain.diffusion.ema import (
    WIDEST,
    Combination,
    PowerEma,
    Profile,
    combine,
    exponent,
    newest_share,
    overlap,
    relative_width,
)

STEPS = 400


def trajectory(steps: int = STEPS) -> torch.Tensor:
    """Weights that learn, wander and wiggle, far from zero. Shape: (steps, 5)."""
    t = torch.arange(1, steps + 1, dtype=torch.float64)[:, None] / steps
    wander = torch.randn(steps, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cumsum(0) / 50
    return 100 + (torch.tensor([0.1, 0.3, 1.0, 3.0, 9.0]) * t).exp().reciprocal() + wander + torch.sin(40 * t) / 10


def tracked(width: float, upto: int = STEPS) -> torch.Tensor:
    """The average by its definition: update k counts k^(gamma+1) - (k-1)^(gamma+1)."""
    k = torch.arange(upto + 1, dtype=torch.float64) / upto
    share = (k ** (exponent(width) + 1)).diff()
    return (share[:, None] * trajectory()[:upto]).sum(0)


@pytest.mark.parametrize("width", [0.001, 0.02, 0.05, 0.1, 0.2, 0.28])
def test_the_exponent_of_a_width_is_the_root_of_its_cubic(width: float) -> None:
    gamma = exponent(width)
    assert relative_width(gamma) == pytest.approx(width, rel=1e-12)
    assert gamma == pytest.approx(np.roots([1, 7, 16 - width**-2, 12 - width**-2]).real.max(), rel=1e-9)


def test_known_exponents_and_the_widest() -> None:
    assert exponent(0.05) == pytest.approx(16.97, abs=0.01) and exponent(0.10) == pytest.approx(6.94, abs=0.01)
    assert exponent(WIDEST) == pytest.approx(0, abs=1e-12)  # the plain mean
    for wrong in (0.0, -0.1, 0.29):
        with pytest.raises(ValueError, match="relative width"):
            exponent(wrong)


@pytest.mark.parametrize("width", [0.05, 0.2])
def test_an_average_is_its_definition(width: float) -> None:
    path = trajectory().float()
    average = PowerEma([("w", torch.zeros(5))], width)
    for k in range(STEPS):
        average.update([("w", path[k])])
    assert average.profile == Profile(exponent(width), STEPS)
    torch.testing.assert_close(average.weights["w"], tracked(width).float(), rtol=0, atol=2e-4)


def test_the_first_update_replaces_the_start_and_large_times_keep_their_digits() -> None:
    average = PowerEma([("w", torch.full((3,), 1e9))], 0.1)
    average.update([("w", torch.ones(3))])
    assert average.weights["w"].tolist() == [1.0, 1.0, 1.0]
    assert newest_share(7.0, 10**12) == pytest.approx(8e-12, rel=1e-9)


def test_overlaps_are_the_integrals() -> None:
    a, b = Profile(17.0, 80), Profile(7.0, 100)
    tau = (np.arange(400_000) + 0.5) / 4000
    densities = [(each.gamma + 1) * tau**each.gamma / each.t ** (each.gamma + 1) * (tau < each.t) for each in (a, b)]
    assert overlap(a, b) == pytest.approx(float((densities[0] * densities[1]).sum() / 4000), rel=1e-4)
    assert overlap(a, b) == overlap(b, a)


def made(found: Combination, stored: list[Profile]) -> torch.Tensor:
    total = torch.zeros(5, dtype=torch.float64)
    for share, each in zip(found.shares, stored, strict=True):
        total += share * tracked(relative_width(each.gamma), each.t)
    return total


def error(width: float, snapshots: int) -> tuple[float, float]:
    every = STEPS // snapshots
    stored = [Profile(exponent(w), t) for t in range(every, STEPS + 1, every) for w in (0.05, 0.10)]
    found = combine(stored, Profile(exponent(width), STEPS))
    return float((made(found, stored) - tracked(width)).abs().max()), found.error


@pytest.mark.parametrize("width", [0.03, 0.07, 0.15, 0.25])
def test_any_width_is_made_from_two_the_better_the_more_snapshots(width: float) -> None:
    errors = [error(width, snapshots) for snapshots in (2, 8, 40)]
    weights, profiles = zip(*errors)
    assert profiles[0] > profiles[1] > profiles[2] and profiles[2] < profiles[0] / 10
    assert weights[0] > weights[1] > weights[2] and weights[2] < weights[0] / 10
    away = float((tracked(width) - tracked(0.05)).abs().max())
    assert weights[2] < 0.03 * away and profiles[2] < 0.03


def test_a_stored_width_is_found_alone() -> None:
    stored = [Profile(exponent(w), t) for t in range(40, STEPS + 1, 40) for w in (0.05, 0.10)]
    found = combine(stored, stored[-1])
    assert found == Combination([0.0] * 19 + [1.0], 0.0)
    near = combine(stored, Profile(stored[-1].gamma * (1 + 1e-12), STEPS))  # by least squares, it is the same
    assert near.shares == pytest.approx(found.shares, abs=1e-6) and near.error < 1e-6
    earlier = combine(stored, stored[4])
    assert earlier.shares[4] == 1.0 and sum(earlier.shares) == 1.0


def test_the_figures_of_the_page_on_averages() -> None:
    page = (Path(__file__).parents[3] / "docs" / "averages.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", page, re.MULTILINE)
    assert len(rows) == 2
    for snapshots, *errors in rows:
        found = [f"{100 * error(width, int(snapshots))[1]:.1f}" for width in (0.03, 0.08, 0.15, 0.25)]
        assert found == errors
