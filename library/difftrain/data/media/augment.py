"""From a decoded picture to what the model sees: resized, mirrored and coloured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from difftrain.diffusion.draws import Stream


_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "linear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "cubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def resize(rgb: np.ndarray, size_wh: tuple[int, int], interpolation: str | None = None) -> np.ndarray:
    """Resize. Default, as in kohya: area where both sides shrink or stay, else lanczos.

    Shapes: rgb (H, W, 3) uint8 -> (h, w, 3) uint8. Pillow smooths before it shrinks, whatever the filter but nearest;
    OpenCV, which kohya uses for all names but lanczos, does not: linear and cubic alias there, here they don't.
    """
    height, width = rgb.shape[:2]
    if (width, height) == tuple(size_wh):
        return rgb
    pillow = Image.fromarray(rgb)
    shrinks = width >= size_wh[0] and height >= size_wh[1]
    name = interpolation or ("area" if shrinks else "lanczos")
    return np.asarray(_area(pillow, size_wh) if name == "area" else pillow.resize(size_wh, _FILTERS[name]))


def _area(pillow: Image.Image, size_wh: tuple[int, int]) -> Image.Image:
    """Average over the covered area, exactly at whole factors, else by the nearest filter.

    Averaging with fractional coverage is a trapezoid filter, which Pillow lacks. Its box is jagged between whole
    factors (31 dB at 1.1); the triangle and the Hamming window stay above 43 dB where they are used here.
    """
    if pillow.width % size_wh[0] == 0 and pillow.height % size_wh[1] == 0:
        return pillow.reduce((pillow.width // size_wh[0], pillow.height // size_wh[1]))
    scale = max(pillow.width / size_wh[0], pillow.height / size_wh[1])
    return pillow.resize(size_wh, Image.Resampling.BILINEAR if scale < 1.35 else Image.Resampling.HAMMING)


def fit(
    rgb: np.ndarray,
    resized_wh: tuple[int, int],
    crop: tuple[int, int, int, int],
    flip: bool = False,
    interpolation: str | None = None,
) -> np.ndarray:
    """Resize, cut out crop = (left, top, width, height) of the resized picture, and mirror it.

    Shapes: rgb (H, W, 3) uint8 -> (3, height, width) uint8, contiguous and writable.
    Raises: ValueError where the crop leaves the picture.
    """
    left, top, width, height = crop
    if left < 0 or top < 0 or left + width > resized_wh[0] or top + height > resized_wh[1]:
        raise ValueError(f"the crop {crop} leaves the picture of {resized_wh[0]} x {resized_wh[1]} px")
    cut = resize(rgb, resized_wh, interpolation)[top : top + height, left : left + width]
    chw = (cut[:, ::-1] if flip else cut).transpose(2, 0, 1)
    return np.array(chw, order="C")


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
