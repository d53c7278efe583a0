"""Moving averages of the trained weights, in fp32, over whatever (name, tensor) pairs a rank owns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_PART = 1 << 26


class Average:
    """Hold averaged weights, which start from the first ones; what is taken in goes to all at once, with no host wait."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.weights = {name: _fp32(tensor).clone(memory_format=torch.contiguous_format) for name, tensor in named}

    @torch.no_grad()
    def blend(self, named: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Move by a share of the way to other weights; the same names in the same order as at the start.

        Half weights are made wide a part at a time.
        """
        offset = 0
        for part in _parts(named):
            offset += len(part)
            averages = [self.weights[name] for name, _ in part]
            # ema <- ema + share (weights - ema), in one launch for many tensors
            torch._foreach_lerp_(averages, [_fp32(tensor) for _, tensor in part], share)
        if offset != len(self.weights):
            raise ValueError(f"the average holds {len(self.weights)} tensors, but {offset} were given")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name: the very tensors, to be copied before the next update."""
        return dict(self.weights)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take averages back, bit by bit. Raises KeyError or ValueError where names or shapes differ."""
        missing, unknown = self.weights.keys() - state.keys(), state.keys() - self.weights.keys()
        if missing or unknown:
            raise KeyError(f"average: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]}")
        for name, average in self.weights.items():
            if average.shape != state[name].shape:
                raise ValueError(f"average of {name}: shape {tuple(state[name].shape)}, not {tuple(average.shape)}")
            average.copy_(state[name])


class Ema(Average):
    """Average weights as ema = decay ema + (1 - decay) weights, once per optimizer update.

    There is no warm-up: the average starts from the first weights, and a short run wants a smaller decay. ramp: the first
    update takes the weights whole, the n-th after it decays by (1 + n) / (10 + n), at most `decay`. Source of the ramp:
    EMAModel.get_decay of diffusers.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], decay: float, *, ramp: bool = False) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"the decay of an average must lie above 0 and below 1, got {decay}")
        super().__init__(named)
        self.decay, self.ramp = decay, ramp
        self.updates = 0

    @property
    def start_share(self) -> float:
        """Return how much of it is still what it began with."""
        return start_share(self.decay, self.updates, ramp=self.ramp)

    def decay_at(self, update: int) -> float:
        """Return the decay of an update, counted from 1."""
        if not self.ramp:
            return self.decay
        n = update - 1
        return min((1.0 + n) / (10.0 + n), self.decay) if n else 0.0

    def update(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take in the weights after an update."""
        self.updates += 1
        self.blend(named, 1.0 - self.decay_at(self.updates))


def start_share(decay: float, updates: int, *, ramp: bool) -> float:
    """Return how much of a moving average is still what it began with: a ramp's first update replaces all of it."""
    return float(not updates) if ramp else decay**updates


def _parts(named: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut into runs of about _PART elements."""
    part: list[tuple[str, Tensor]] = []
    elements = 0
    for name, tensor in named:
        part.append((name, tensor))
        elements += tensor.numel()
        if elements >= _PART:
            yield part
            part, elements = [], 0
    if part:
        yield part


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32)


# --- Averages whose memory is a share of the run so far, and any other such average made from stored ones afterwards
# The weights at update k count as the integral of tau^gamma over (k - 1, k], out of (0, t]: young weights ever more, and
# the wider the average, the further back. Its relative width is the standard deviation of that density over t.
# Source: Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3 and
# appendix C.


WIDEST = 12.0**-0.5  # gamma = 0: the plain mean of all updates


class Profile(NamedTuple):
    """Say which average, and when: exponent gamma, after t updates."""

    gamma: float
    t: int


class PowerEma(Average):
    """Average weights with a relative width; after t updates the last one has the share 1 - (1 - 1/t)^(gamma + 1).

    Source: equation 1 (the density), equation 2 (the update).
    """

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
    """Return 1 - (1 - 1/t)^(gamma + 1), the share of update t, with all digits for large t. Source: equation 127."""
    # 1 - (1 - 1/t)^n as -expm1(n log1p(-1/t)): the difference of two numbers near 1 would lose digits
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
        raise ValueError(f"a relative width must be above 0 and at most {WIDEST:.4f}, got {width}")
    # the cubic with its square term removed, solved by Viete: three real roots are three cosines of one angle
    s = width**-2
    p, q = -(s + 1.0 / 3.0), 2.0 / 27.0 + 4.0 * s / 3.0
    radius = math.sqrt(-p / 3.0)
    angle = math.acos(max(-1.0, min(1.0, 1.5 * q / (p * radius)))) / 3.0
    return max(0.0, 2.0 * radius * math.cos(angle) - 7.0 / 3.0)


def overlap(a: Profile, b: Profile) -> float:
    """Return the inner product of two densities, each zero beyond its own t: the integral up to the smaller one."""
    # the longer one counts only as far as the shorter goes
    first, second = sorted((a, b), key=lambda profile: profile.t)
    # integral of tau^(a + b) up to the smaller t, over the norms t^(gamma + 1) / (gamma + 1) of both
    scale = (a.gamma + 1.0) * (b.gamma + 1.0) / (a.gamma + b.gamma + 1.0)
    return scale * (first.t / second.t) ** second.gamma / second.t


class Combination(NamedTuple):
    """Say how stored averages make another: their shares, and how far it is from it.

    error: the norm of what is left of the wanted density, relative to its own.
    """

    shares: list[float]
    error: float


def combine(stored: Sequence[Profile], target: Profile) -> Combination:
    """Make a profile from stored ones by least squares over their densities; a stored one is taken as it is.

    The shares sum to 1, as the densities do: weights are large beside what training moves them by, and a sum a little
    off would scale them all. Densities are brought to unit length first: those of early snapshots are large, and would
    drown the others. Source: algorithm 3, which leaves the sum free.
    """
    if target in stored:
        index = stored.index(target)
        return Combination([float(i == index) for i in range(len(stored))], 0.0)
    # densities at unit length, and what the wanted one has along each
    length = np.array([math.sqrt(overlap(profile, profile)) for profile in stored])
    among = np.array([[overlap(a, b) for b in stored] for a in stored]) / np.outer(length, length)
    own = math.sqrt(overlap(target, target))
    toward = np.array([overlap(profile, target) for profile in stored]) / (length * own)
    # least squares with the shares summing to 1: the free solution, moved along its Lagrange direction
    unit = own / length
    free, pull = np.linalg.lstsq(among, np.stack([toward, unit], axis=1), rcond=1e-12)[0].T
    shares = free + pull * (1.0 - unit @ free) / (unit @ pull)
    # the squared norm of what is left over, as 1 - 2 b x + x A x
    left = 1.0 - 2.0 * float(toward @ shares) + float(shares @ among @ shares)
    return Combination((shares * unit).tolist(), math.sqrt(max(0.0, left)))
