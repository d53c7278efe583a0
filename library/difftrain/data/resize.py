"""From a decoded picture to what the model sees: resized, cropped, flipped. kohya's meaning, Pillow's filters."""

from __future__ import annotations

import numpy as np
from PIL import Image

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
