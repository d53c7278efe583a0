"""Rectified flow: x_t = (1 - t) x0 + t e, whose velocity e - x0 is learnt, and how the time t in (0, 1) is drawn.

Source: Esser et al. 2024 (SD3), section 3 and appendix B. A time is a quantile of its distribution: the host draws u
uniformly and takes the inverse of the distribution function in fp64, so training and evaluation share one formula.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from difftrain.contracts import Bucket

METHODS = ("logit_normal", "uniform", "mode", "cosmap")
SCALE = 1000.0  # the model sees 1000 t
HIGHEST_MODE_SCALE = 2.0 / (math.pi - 2.0)  # above it the mode sampler is no longer a growing function
FLUX_TOKENS, FLUX_MU = (256, 4096), (0.5, 1.15)
STEPS = 50  # of a walk, where mu follows their number and nothing is walked
_EDGE = 2.0**-54  # half a step of the uniform draws: what 0 and 1 stand for
_HALVINGS = 60  # of an interval, until it is narrower than fp64 can tell
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True)
class FlowTime:
    """Map a uniform number to a time t in (0, 1), in fp64: sampled, shifted, cut to [min_t, max_t]. Growing; picklable.

    shift: of t <- s t / (1 + (s - 1) t); None: none. flux_shift: s follows the number of latent tokens. token: pixels
    along a token's side. The cut is a truncation of the distribution after the shift: what lies within keeps its
    proportions, nothing piles up at the ends.
    dynamic: of flux_shift, first and last number of tokens and mu there; mu: a function of tokens and steps in its place.
    frames: of a clip that one latent frame after the first stands for, 0 for pictures.
    """

    method: str = "logit_normal"
    sigmoid_scale: float = 1.0
    mode_scale: float = 1.29
    shift: float | None = None
    flux_shift: bool = False
    min_t: float = 0.0
    max_t: float = 1.0
    token: int = 16
    dynamic: tuple[int, int, float, float] = (*FLUX_TOKENS, *FLUX_MU)
    frames: int = 0
    mu: Callable[[int, int], float] | None = None

    def __call__(self, u: float, bucket: Bucket) -> float:
        """Return the quantile u, of a picture of a bucket's size."""
        s = self.shift_of(bucket)
        # a truncated distribution: u goes to the quantiles between those of min_t and max_t
        low, high = _bounds(self, s)
        t = shifted(self._base(low + u * (high - low)), s)
        return _inside(min(max(t, self.min_t), self.max_t))  # far out in a tail quantiles are coarser than times

    def shift_of(self, bucket: Bucket) -> float:
        """Return s of a picture of a bucket's size; 1 is no shift."""
        if self.flux_shift:
            # the first frame of a clip has a latent frame of its own, the others share one
            layers = (bucket.frames - 1) // self.frames + 1 if self.frames else 1
            tokens = layers * (bucket.height // self.token) * (bucket.width // self.token)
            return flux_shift(tokens, self.dynamic) if self.mu is None else math.exp(self.mu(tokens, STEPS))
        return 1.0 if self.shift is None else self.shift

    def _base(self, u: float) -> float:
        """Return the quantile before the shift."""
        u = _inside(u)
        match self.method:
            case "uniform":
                return u
            case "logit_normal":
                return _sigmoid(self.sigmoid_scale * _NORMAL.inv_cdf(u))
            case "mode":
                return mode(u, self.mode_scale)
            case "cosmap":
                return cosmap(u)
        raise ValueError(f"a time is sampled by one of {', '.join(METHODS)}, got {self.method!r}")

    def share_below(self, t: float, s: float) -> float:
        """Return the distribution function at t, after a shift by s and before the cut."""
        if t <= 0.0 or t >= 1.0:
            return 0.0 if t <= 0.0 else 1.0
        # undo the shift: the distribution functions below are of the plain time
        t = _inside(shifted(t, 1.0 / s))
        match self.method:
            case "uniform":
                return t
            case "logit_normal":
                # equation 19: the logit of t is normal
                return _NORMAL.cdf(math.log(t / (1.0 - t)) / self.sigmoid_scale)
            case "cosmap":
                return 2.0 / math.pi * math.atan2(t, 1.0 - t)
        return _inverse(self._base, t)


@functools.lru_cache(maxsize=4096)
def _bounds(time: FlowTime, s: float) -> tuple[float, float]:
    """Return between which quantiles of the whole distribution the times within [min_t, max_t] lie."""
    return time.share_below(time.min_t, s), time.share_below(time.max_t, s)


def mode(u: float, scale: float) -> float:
    """Return the quantile of SD3's sampler with heavy tails, for -1 <= scale <= 1.75: u + scale (u - sin^2(pi u / 2)).

    The paper's is this of 1 - u, which falls; both draw the same times (equation 20).
    """
    return u + scale * (u - math.sin(math.pi * u / 2.0) ** 2)


def cosmap(u: float) -> float:
    """Return the quantile of the times that a cosine schedule has: 1 - 1 / (tan(pi u / 2) + 1) (equation 21)."""
    angle = math.pi * u / 2.0
    return math.sin(angle) / (math.sin(angle) + math.cos(angle))


def shifted(t: float, s: float) -> float:
    """Return s t / (1 + (s - 1) t); the shift by 1 / s undoes it (equation 23)."""
    return s * t / (1.0 + (s - 1.0) * t)


def flux_shift(tokens: int, dynamic: tuple[int, int, float, float] = (*FLUX_TOKENS, *FLUX_MU)) -> float:
    """Return s = e^mu with mu linear in the number of latent tokens: of Flux 0.5 at 256, 1.15 at 4096, on beyond these."""
    first, last, low, high = dynamic
    return math.exp(low + (tokens - first) * (high - low) / (last - first))


def _inside(u: float) -> float:
    return min(max(u, _EDGE), 1.0 - 2.0 * _EDGE)


def _sigmoid(x: float) -> float:
    # both forms are equal; each overflows on the other side of 0
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else math.exp(x) / (1.0 + math.exp(x))


def _inverse(growing: Callable[[float], float], value: float) -> float:
    """Return where in [0, 1] a growing function has a value, by halving."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if growing(middle) < value else (low, middle)
    return (low + high) / 2.0


def add_noise(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return x_t = (1 - t) x0 + t e (equation 13).

    Shapes: x0, noise (B, ...), t (B,) in [0, 1]; of clips (B, C, F, H, W) also (B, F).
    """
    # a time of its own for each frame of a clip, or one for the sample
    t = t[:, None, :, None, None] if t.ndim == 2 else t.view(-1, *(1,) * (x0.ndim - 1))
    return (1.0 - t) * x0 + t * noise


def target(x0: Tensor, noise: Tensor) -> Tensor:
    """Return the velocity dx_t / dt = e - x0."""
    return noise - x0
