"""Colour augmentation: a third of the uses get another hue or another gamma, within kohya's ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from difftrain.diffusion.draws import Stream

_SHARE = 0.33
_HUE_DEGREES = 16.0  # 8 of OpenCV's half-degrees either way
_GAMMA = (0.95, 1.05)


def recoloured(pixels: np.ndarray, stream: Stream) -> np.ndarray:
    """Leave a picture as it is, turn its hue, or change its gamma, as the draws say. Shape: (3, H, W) uint8."""
    if stream.uniform() > _SHARE:
        return pixels
    if stream.uniform() > 0.5:
        return with_hue(pixels, (2 * stream.uniform() - 1) * _HUE_DEGREES)
    return with_gamma(pixels, _GAMMA[0] + (_GAMMA[1] - _GAMMA[0]) * stream.uniform())


def with_gamma(pixels: np.ndarray, gamma: float) -> np.ndarray:
    """Raise every value to a power. As in kohya's scripts the range is 0 to 255, so it brightens or darkens, too."""
    table = np.clip(np.arange(256.0) ** gamma, 0, 255).astype(np.uint8)
    return table[pixels]


def with_hue(pixels: np.ndarray, degrees: float) -> np.ndarray:
    """Turn the hue; saturation and value stay (the hexagonal HSV model, in fp32, rounded to nearest)."""
    red, green, blue = pixels.astype(np.float32)
    value, least = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    chroma = value - least
    safe = np.where(chroma > 0, chroma, np.float32(1))
    sector = np.where(
        value == red,
        (green - blue) / safe,
        np.where(value == green, (blue - red) / safe + np.float32(2), (red - green) / safe + np.float32(4)),
    ) + np.float32(degrees / 60)
    turned = np.empty_like(pixels)
    for channel, shift in enumerate((5, 3, 1)):  # how far into its ramp each colour is
        ramp = (sector + np.float32(shift)) % np.float32(6)
        lack = np.clip(np.minimum(ramp, np.float32(4) - ramp), 0, 1)
        turned[channel] = (value - chroma * lack + np.float32(0.5)).astype(np.uint8)
    return turned
