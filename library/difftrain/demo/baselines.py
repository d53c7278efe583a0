"""What velocity losses are reached without a network: by the mean picture, the nearest caption's, and Gaussians.

Of a rectified flow x_t = (1 - t) x_0 + t e the velocity is e - x_0. A belief about x_0 alone - a point m, or a Gaussian
with mean m and variance v of each element - gives E[e - x_0 | x_t] in closed form, since e = (x_t - (1 - t) x_0) / t.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")

Velocity = Callable[["Tensor", "Tensor"], "Tensor"]  # of x_t (B, ...) and t (B,)


def words(caption: str) -> frozenset[str]:
    """Return the words of a caption, each once, in lower case; "medium-dark" is one."""
    return frozenset(_WORD.findall(caption.lower().replace("’", "'")))


class Nearest:
    """Find for a caption the one of others whose words, weighed by how rare they are, are most like its own."""

    def __init__(self, captions: Sequence[str]) -> None:
        self._own = [words(caption) for caption in captions]
        counts = Counter(word for each in self._own for word in each)
        self._weight = {word: math.log(len(captions) / count) for word, count in counts.items()}
        self._places = {word: number for number, word in enumerate(sorted(counts))}
        self._rows = self._matrix(self._own)

    def of(self, captions: Sequence[str]) -> Tensor:
        """Return the place of the nearest caption of each: by cosine, of equals the first. Shape: (B,) int64."""
        return (self._matrix([words(caption) for caption in captions]) @ self._rows.T).argmax(1)

    def of_own(self) -> Tensor:
        """Return the place of the nearest other caption of each own one. Shape: (N,) int64."""
        return (self._rows @ self._rows.T).fill_diagonal_(-1.0).argmax(1)

    def _matrix(self, captions: Sequence[frozenset[str]]) -> Tensor:
        rows = torch.zeros(len(captions), max(1, len(self._places)))
        for row, caption in zip(rows, captions, strict=True):
            for word in caption & self._places.keys():
                row[self._places[word]] = self._weight[word]
        return torch.nn.functional.normalize(rows, dim=1)


class Baselines:
    """Every predictor that a trained network has to beat, fitted to the training set's latents and captions."""

    def __init__(self, latents: Tensor, captions: Sequence[str]) -> None:
        """Fit them. Shape: latents (N, C, H, W), fp32."""
        self._latents = latents
        self._mean, self._variance = latents.mean(0), latents.var(0)
        self._nearest = Nearest(captions)
        apart = latents - latents[self._nearest.of_own()]
        self._apart = apart.square().mean(0)  # between a picture and its nearest caption's, of each element

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.of([""]))

    def of(self, captions: Sequence[str]) -> dict[str, Velocity]:
        """Return the predictors for samples with these captions.

        mean_latent, nearest_caption: the velocity of that picture's negative, the mean over e. …_point: x_0 is taken
        to be that picture exactly. gaussian: x_0 has the training set's mean and variance of each element.
        gaussian_about_nearest: of the nearest caption's picture, and its mean squared error in the training set.
        """
        near = self._latents[self._nearest.of(captions)]
        return {
            "mean_latent": lambda x, t: -self._mean.expand_as(x),
            "mean_latent_point": lambda x, t: point(x, t, self._mean),
            "nearest_caption": lambda x, t: -near,
            "nearest_caption_point": lambda x, t: point(x, t, near),
            "gaussian": lambda x, t: gaussian(x, t, self._mean, self._variance),
            "gaussian_about_nearest": lambda x, t: gaussian(x, t, near, self._apart),
        }


def point(x_t: Tensor, t: Tensor, mean: Tensor) -> Tensor:
    """Return the velocity that is certain where x_0 is: (x_t - x_0) / t."""
    return (x_t - mean) / _beside(t, x_t)


def gaussian(x_t: Tensor, t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[e - x_0 | x_t] for x_0 ~ N(mean, variance), each element by itself.

    With s = 1 - t: E[x_0 | x_t] = mean + s v (x_t - s mean) / (s^2 v + t^2), and the velocity is (x_t - that) / t.
    """
    time = _beside(t, x_t)
    rest = 1 - time
    x_0 = mean + rest * variance * (x_t - rest * mean) / (rest**2 * variance + time**2)
    return (x_t - x_0) / time


def _beside(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x).view(-1, *[1] * (x.dim() - 1))
