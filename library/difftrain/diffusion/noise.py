"""Noise that is not white: offset per channel, and sums over resolutions. Made on the host, a sample at a time.

Every operation is exact by IEEE 754 and every sum that matters is of integers, so that the noise is the same bits on
every machine, whatever its vector units; nothing looks at the rest of the batch.
Source: Guttenberg 2023 (offset noise); Whitaker 2023 (multi-resolution noise); kohya's forms of both.
"""

from __future__ import annotations

import math

import numpy as np

from difftrain.contracts import NoiseMix
from difftrain.diffusion.draws import Stream, normal, uniform

_GRID = 1 << 16  # squares are summed as integers: exact in any order, and good to 2^-17 of an element
_RATIO_LOW, _RATIO_SPAN = 2.0, 2.0  # a level is this much smaller, to its power, than the one before


def mixed(seed: int, key: bytes, occurrence: int, name: str, shape: tuple[int, ...], mix: NoiseMix) -> np.ndarray:
    """Draw the noise of one sample. Shape: (C, H, W) fp32.

    The white noise, the offset's and each level's are draws of their own, named after `name`.
    """
    noise = normal(seed, key, occurrence, name, shape)
    if mix.offset:
        strength = np.float32(mix.offset)
        if mix.offset_random:
            strength *= np.float32(uniform(seed, key, occurrence, f"{name}_offset_strength"))
        noise += strength * normal(seed, key, occurrence, f"{name}_offset", (shape[0], 1, 1))
    if mix.iterations:
        _add_levels(noise, seed, key, occurrence, name, mix)
        if mix.normalise:
            noise /= np.float32(deviation(noise))
    return noise


def _add_levels(noise: np.ndarray, seed: int, key: bytes, occurrence: int, name: str, mix: NoiseMix) -> None:
    """Add coarser and coarser noise, stretched, in place: level i is discount^i strong and r^i smaller, r in [2, 4)."""
    channels, height, width = noise.shape
    ratios = Stream(seed, key, occurrence, f"{name}_multires")
    share = 1.0
    for i in range(mix.iterations):
        ratio = ratios.uniform() * _RATIO_SPAN + _RATIO_LOW
        smaller = math.prod([ratio] * i)
        size = max(1, int(height / smaller)), max(1, int(width / smaller))
        level = normal(seed, key, occurrence, f"{name}_multires_{i}", (channels, *size))
        noise += stretch(level, (height, width)) * np.float32(share)
        share *= mix.discount
        if 1 in size:
            return


def stretch(image: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    """Enlarge bilinearly, pixel centres half a pixel in, edges held. Shapes: (C, h, w) -> (C, H, W) fp32."""
    for axis, size in ((1, size_hw[0]), (2, size_hw[1])):
        if image.shape[axis] != size:
            image = _stretched(image, axis, size)
    return image


def _stretched(image: np.ndarray, axis: int, size: int) -> np.ndarray:
    held = image.shape[axis]
    place = np.maximum((np.arange(size) + 0.5) * (held / size) - 0.5, 0.0)
    low = np.minimum(place.astype(np.intp), held - 1)
    high = np.minimum(low + 1, held - 1)
    shape = [1, 1, 1]
    shape[axis] = size
    weight = (place - low).astype(np.float32).reshape(shape)
    return image.take(low, axis) * (np.float32(1) - weight) + image.take(high, axis) * weight


def deviation(noise: np.ndarray) -> float:
    """Return the sample standard deviation (over n - 1), by integers: the same in whatever order they are added."""
    whole = np.rint(noise.astype(np.float64) * _GRID).astype(np.int64)
    n, total = whole.size, int(whole.sum())
    squares = sum((whole * whole).sum(axis=-1).ravel().tolist())  # a row fits 64 bits, a video's latent may not
    return math.sqrt((n * squares - total * total) / (n * (n - 1))) / _GRID
