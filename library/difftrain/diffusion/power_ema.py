"""Averages whose memory is a share of the run so far, and any other such average made from stored ones afterwards.

The weights at update k count as the integral of tau^gamma over (k - 1, k], out of (0, t]: young weights ever more, and
the wider the average, the further back. Its relative width is the standard deviation of that density over t.
Source: Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3 and
appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from difftrain.diffusion.ema import Average

WIDEST = 12.0**-0.5  # gamma = 0: the plain mean of all updates


class Profile(NamedTuple):
    """Say which average, and when: exponent gamma, after t updates."""

    gamma: float
    t: int


class PowerEma(Average):
    """Average weights with a relative width; after t updates the last one has the share 1 - (1 - 1/t)^(gamma + 1)."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], width: float) -> None:
        super().__init__(named)
        self.width, self.gamma = width, exponent(width)
        self.updates = 0

    def update(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take in the weights after an update; the first one replaces what was there."""
        self.updates += 1
        self.blend(named, newest_share(self.gamma, self.updates))

    @property
    def profile(self) -> Profile:
        """Return which average this is by now."""
        return Profile(self.gamma, self.updates)


def newest_share(gamma: float, t: int) -> float:
    """Return 1 - (1 - 1/t)^(gamma + 1), the share of the weights of update t, with all digits for large t."""
    return 1.0 if t == 1 else -math.expm1((gamma + 1.0) * math.log1p(-1.0 / t))


def relative_width(gamma: float) -> float:
    """Return the standard deviation of the density (gamma + 1) tau^gamma on [0, 1]. Source: equation 123."""
    return math.sqrt((gamma + 1.0) / (gamma + 3.0)) / (gamma + 2.0)


def exponent(width: float) -> float:
    """Return the gamma >= 0 of a relative width in (0, 0.2887].

    With s = width^-2 it is the largest root of gamma^3 + 7 gamma^2 + (16 - s) gamma + 12 - s; x = gamma + 7/3 leaves
    x^3 + p x + q, which has three real ones, so they are cosines.
    """
    if not 0.0 < width <= WIDEST:
        raise ValueError(f"a relative width lies above 0 and is at most {WIDEST:.4f}, got {width}")
    s = width**-2
    p, q = -(s + 1.0 / 3.0), 2.0 / 27.0 + 4.0 * s / 3.0
    radius = math.sqrt(-p / 3.0)
    angle = math.acos(max(-1.0, min(1.0, 1.5 * q / (p * radius)))) / 3.0
    return max(0.0, 2.0 * radius * math.cos(angle) - 7.0 / 3.0)


def overlap(a: Profile, b: Profile) -> float:
    """Return the inner product of two densities, each zero beyond its own t: the integral up to the smaller one."""
    first, second = sorted((a, b), key=lambda each: each.t)  # the longer one counts only as far as the shorter goes
    scale = (a.gamma + 1.0) * (b.gamma + 1.0) / (a.gamma + b.gamma + 1.0)
    return scale * (first.t / second.t) ** second.gamma / second.t


class Combination(NamedTuple):
    """Say how stored averages make another: their shares, and how far it is from it.

    error: the norm of what is left of the wanted density, relative to its own.
    """

    shares: list[float]
    error: float


def combine(stored: Sequence[Profile], wanted: Profile) -> Combination:
    """Make a profile from stored ones by least squares over their densities; a stored one is taken as it is.

    The shares sum to 1, as the densities do: weights are large beside what training moves them by, and a sum a little
    off would scale them all. Densities are brought to unit length first: those of early snapshots are large, and would
    drown the others. Source: algorithm 3, which leaves the sum free.
    """
    if wanted in stored:
        place = stored.index(wanted)
        return Combination([float(i == place) for i in range(len(stored))], 0.0)
    length = np.array([math.sqrt(overlap(each, each)) for each in stored])
    among = np.array([[overlap(a, b) for b in stored] for a in stored]) / np.outer(length, length)
    own = math.sqrt(overlap(wanted, wanted))
    toward = np.array([overlap(each, wanted) for each in stored]) / (length * own)
    unit = own / length
    free, pull = np.linalg.lstsq(among, np.stack([toward, unit], axis=1), rcond=1e-12)[0].T
    shares = free + pull * (1.0 - unit @ free) / (unit @ pull)
    left = 1.0 - 2.0 * float(toward @ shares) + float(shares @ among @ shares)
    return Combination((shares * unit).tolist(), math.sqrt(max(0.0, left)))
