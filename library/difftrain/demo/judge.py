"""Judge pictures of shapes by what they show, and losses by what a linear predictor reaches."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from difftrain.demo import datasets
from difftrain.diffusion import ddpm

FOREGROUND = 80  # a pixel whose darkest channel is this far from white belongs to the shape
BORDER = 0.105  # share of the picture between small and large shapes: 0.04..0.07 and 0.15..0.27 as drawn
ONE_PIECE = 0.9  # share of the foreground that one piece must have
TEMPLATE_SIDE = 24


@dataclass(frozen=True)
class Verdict:
    """What one picture shows. None, 0 and 0 where it shows nothing."""

    colour: str | None
    shape: str | None
    area: float  # share of the picture that is foreground
    largest: float  # share of the foreground in its largest connected piece

    @property
    def size(self) -> str:
        """Return the size's word."""
        return "large" if self.area > BORDER else "small"


def look(picture: NDArray[np.uint8]) -> Verdict:
    """Judge one picture of a shape on white. Shape: (H, W, 3)."""
    pixels = picture.astype(np.int64)
    depth = 255 - pixels.min(axis=2)
    foreground = depth > FOREGROUND
    count = int(foreground.sum())
    if not count:
        return Verdict(None, None, 0.0, 0.0)
    # the colour is that of the deeper half: edges are mixed with white
    core = foreground & (depth >= np.median(depth[foreground]))
    mean = np.median(pixels[core], axis=0)
    distance = {name: float(((mean - np.array(rgb)) ** 2).sum()) for name, rgb in datasets.COLOURS.items()}
    colour = min(distance, key=lambda name: distance[name])
    return Verdict(colour, shape_of(foreground), count / foreground.size, largest_piece(foreground))


def shape_of(mask: NDArray[np.bool_]) -> str:
    """Return the shape whose outline a mask overlaps best, both stretched to one square."""
    ours = _normalised(mask)
    overlap = {
        name: float((ours & template).sum() / (ours | template).sum()) for name, template in _templates().items()
    }
    return max(overlap, key=lambda name: overlap[name])


@functools.cache
def _templates() -> dict[str, NDArray[np.bool_]]:
    drawn = {name: np.asarray(datasets.draw(datasets.Scene("large", "black", name), 96)) for name in datasets.SHAPES}
    return {name: _normalised(pixels.min(axis=2) < 128) for name, pixels in drawn.items()}


def _normalised(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Stretch what a mask surrounds to a square."""
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    cut = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    resized = Image.fromarray(cut.astype(np.uint8) * 255).resize(
        (TEMPLATE_SIDE, TEMPLATE_SIDE), Image.Resampling.BILINEAR
    )
    return np.asarray(resized) >= 128


def largest_piece(mask: NDArray[np.bool_]) -> float:
    """Return the share of a mask's pixels in its largest 4-connected piece."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:  # every pixel takes the largest label of its neighbours until nothing changes
        padded = np.pad(labels, 1)
        around = [padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]]
        spread = np.where(mask, np.maximum.reduce([labels, *around]), 0)
        if np.array_equal(spread, labels):
            break
        labels = spread
    return float(np.bincount(labels[mask]).max() / mask.sum()) if mask.any() else 0.0


def obedience(pictures: Sequence[NDArray[np.uint8]], captions: Sequence[str]) -> dict[str, float]:
    """Return shares of pictures: colour, shape and size right, one connected piece; and what chance gives."""
    scenes = [datasets.parse(caption) for caption in captions]
    verdicts = [look(picture) for picture in pictures]
    pairs = list(zip(verdicts, scenes, strict=True))
    return {
        "pictures": len(pairs),
        "colour_right": _share(v.colour == s.colour for v, s in pairs),
        "colour_chance": 1 / len(datasets.COLOURS),
        "shape_right": _share(v.shape == s.shape for v, s in pairs),
        "shape_chance": 1 / len(datasets.SHAPES),
        "size_right": _share(v.colour is not None and v.size == s.size for v, s in pairs),
        "size_chance": 1 / len(datasets.SIZES),
        "one_piece": _share(v.largest >= ONE_PIECE for v in verdicts),
    }


def _share(hits: Iterable[bool]) -> float:
    shares = list(hits)
    return sum(shares) / len(shares)


class Wiener:
    """The best linear predictor of the target from x_t: what a Gaussian with the data's mean and covariance allows.

    x_0 ~ N(mu, C) gives E[x_0 | x_t] = mu + a C (a^2 C + s^2 I)^-1 (x_t - a mu), a = alpha_t, s = sigma_t, and the
    noise and the velocity follow from it linearly. It knows no captions.
    """

    def __init__(self, latents: Tensor) -> None:
        """Fit mean and covariance. Shape: (N, ...) of training latents."""
        flat = latents.flatten(1).double()
        self._fit(len(flat), flat.sum(0), flat.T @ flat)

    @classmethod
    def from_moments(cls, count: int, total: Tensor, outer: Tensor) -> Wiener:
        """Fit from sums over samples: how many, of the flat latents (D,), of their outer products (D, D), fp64."""
        fitted = cls.__new__(cls)
        fitted._fit(count, total, outer)
        return fitted

    def _fit(self, count: int, total: Tensor, outer: Tensor) -> None:
        self.mean = total / count
        covariance = (outer - count * torch.outer(self.mean, self.mean)) / (count - 1)
        values, self.basis = torch.linalg.eigh(covariance)
        self.variance = values.clamp(min=0.0)

    def predict(self, x_t: Tensor, t: Tensor, prediction_type: str) -> Tensor:
        """Predict noise or velocity. Shapes: x_t (B, ...), t (B,)."""
        table = ddpm.tables()
        a, s = (column[t.cpu()].double().unsqueeze(1) for column in (table.alpha, table.sigma))
        x = x_t.flatten(1).double().cpu()
        along = (x - a * self.mean) @ self.basis
        x_0 = self.mean + (along * (a * self.variance) / (a**2 * self.variance + s**2)) @ self.basis.T
        noise = (x - a * x_0) / s
        out = noise if prediction_type == "epsilon" else a * noise - s * x_0
        return out.view(x_t.shape)


# --- What velocity losses are reached without a network: by the mean picture, the nearest caption's, and Gaussians
# Of a rectified flow x_t = (1 - t) x_0 + t e the velocity is e - x_0. A belief about x_0 alone - a point m, or a Gaussian
# with mean m and variance v of each element - gives E[e - x_0 | x_t] in closed form, since e = (x_t - (1 - t) x_0) / t.


_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")

Velocity = Callable[["Tensor", "Tensor"], "Tensor"]  # of x_t (B, ...) and t (B,)


def words(caption: str) -> frozenset[str]:
    """Return the words of a caption, each once, in lower case; "medium-dark" is one."""
    return frozenset(_WORD.findall(caption.lower().replace("’", "'")))


class Nearest:
    """Find for a caption the one of others whose words, weighed by how rare they are, are most like its own."""

    def __init__(self, captions: Sequence[str]) -> None:
        self._own = [words(caption) for caption in captions]
        counts = Counter(word for words in self._own for word in words)
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
    remaining = 1 - time
    x_0 = mean + remaining * variance * (x_t - remaining * mean) / (remaining**2 * variance + time**2)
    return (x_t - x_0) / time


def _beside(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x).view(-1, *[1] * (x.dim() - 1))
