"""Where a picture is cut: the middle, a random place, or around a face; mirrored or not. A function of its size and use."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from difftrain.contracts import Draw, Record
from difftrain.data.plan.buckets import BucketTable, Fit
from difftrain.data.sources.base import picture_name
from difftrain.diffusion.draws import Stream, integer

_FACE = re.compile(r"_(\d+)_(\d+)_(\d+)_(\d+)$")
_SMALL_FACE = 40  # px: a smaller one is put into the middle, exactly


class CropSettings(Protocol):
    """What of a source's recipe decides the cut."""

    @property
    def buckets(self) -> BucketTable: ...
    @property
    def flip(self) -> bool: ...
    @property
    def random_crop(self) -> bool: ...
    @property
    def face_crop_range(self) -> tuple[float, float] | None: ...  # lowest and highest zoom


class Face(NamedTuple):
    """A face in the pixels of its picture: the middle, and the larger side."""

    x: int
    y: int
    size: int


class CropWindow(NamedTuple):
    """Where one use of a picture is cut: resized to fit.resized_wh, from (left, top) on, and mirrored or not.

    native: SDXL is told of an uncropped picture of the bucket's size.
    """

    fit: Fit
    left: int
    top: int
    flip: bool
    native: bool = False

    @property
    def crop(self) -> tuple[int, int, int, int]:
        """Return (left, top, width, height) in the resized picture."""
        return self.left, self.top, self.fit.bucket.width, self.fit.bucket.height

    @property
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Return SDXL's original size, crop's top left and target size; a random crop does not show in them (kohya)."""
        if self.native:
            return self.fit.target_hw, (0, 0), self.fit.target_hw
        return self.fit.original_hw, self.fit.top_left(self.flip), self.fit.target_hw


def crop_window(recipe: CropSettings, record: Record, draw: Draw, seed: int) -> CropWindow:
    """Choose where one use of a record is cut. Raises ValueError where no bucket fits."""
    fit = recipe.buckets.select((record.size_hw[1], record.size_hw[0]))
    if record.frames > 1:
        fit = replace(fit, bucket=fit.bucket._replace(frames=record.frames))
    flip = recipe.flip and integer(seed, draw.key, draw.occurrence, "flip", 2) == 1
    face = face_of(picture_name(record)) if recipe.face_crop_range else None
    if face is not None:
        return _around(face, recipe, fit, flip, Stream(seed, draw.key, draw.occurrence, "face"))
    left, top = fit.crop
    if recipe.random_crop:
        stream = Stream(seed, draw.key, draw.occurrence, "crop")
        left = stream.integer(fit.resized_wh[0] - fit.bucket.width + 1)
        top = stream.integer(fit.resized_wh[1] - fit.bucket.height + 1)
    return CropWindow(fit, left, top, flip)


def face_of(name: str) -> Face | None:
    """Read a face from a file name that ends in _x_y_width_height, as kohya's tool writes it; None where none is named."""
    stem = name.rpartition("/")[2].rpartition(".")[0]
    match = _FACE.search(stem)
    if match is None:
        return None
    x, y, width, height = map(int, match.groups())
    return Face(x, y, max(width, height)) if x > 0 and max(width, height) > 0 else None


def _around(face: Face, recipe: CropSettings, fit: Fit, flip: bool, stream: Stream) -> CropWindow:
    """Cut around a face: the frame's shorter side is as many times the face as a number of the range says (kohya).

    A picture is never enlarged, except where it would not fill the frame. SDXL is told of an uncropped picture of the
    frame's size.
    """
    assert recipe.face_crop_range is not None

    # how far the picture is zoomed: enough to fill the frame, and never beyond the range
    least, most = recipe.face_crop_range
    (width, height), bucket = fit.original_wh, fit.bucket
    side = min(bucket.height, bucket.width)
    # the zoom at which the picture just fills the frame
    cover = max(bucket.height / height, bucket.width / width)
    low = max(cover, min(1.0, side / (face.size * most)))
    high = max(low, min(1.0, side / (face.size * least)))
    scale = low + (high - low) * stream.uniform()
    resized_wh = int(width * scale + 0.5), int(height * scale + 0.5)

    # where the frame lies, along each axis
    # a face that is small in the frame need not sit in its middle
    drifts = not recipe.random_crop and least != most and face.size > side // 10 and face.size >= _SMALL_FACE
    starts = []
    for center, length, extent in zip((face.y, face.x), resized_wh[::-1], (bucket.height, bucket.width), strict=True):
        at = int(center * scale + 0.5)
        start = at - extent // 2
        if recipe.random_crop:  # two draws: the face stays near the middle more often than not
            reach = max(length - at, at)
            start += stream.integer(reach + 1) + stream.integer(reach + 1) - reach
        elif drifts:
            lowest, highest = -face.size // 20, face.size // 20
            start += lowest + stream.integer(highest - lowest + 1)
        starts.append(max(0, min(start, length - extent)))
    return CropWindow(replace(fit, resized_wh=resized_wh), starts[1], starts[0], flip, native=True)


# --- From a decoded picture to what the model sees: resized, mirrored and coloured


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
    return np.asarray(_area(pillow, size_wh) if name in ("area", "box") else pillow.resize(size_wh, _FILTERS[name]))


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
        raise ValueError(f"the crop {crop} exceeds the image of {resized_wh[0]} x {resized_wh[1]} px")
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
    colourfulness = value - least
    safe = np.where(colourfulness > 0, colourfulness, np.float32(1))
    sector = np.where(
        value == red,
        (green - blue) / safe,
        np.where(value == green, (blue - red) / safe + np.float32(2), (red - green) / safe + np.float32(4)),
    ) + np.float32(degrees / 60)
    turned = np.empty_like(pixels)
    for channel, shift in enumerate((5, 3, 1)):  # how far into its ramp each colour is
        ramp = (sector + np.float32(shift)) % np.float32(6)
        lack = np.clip(np.minimum(ramp, np.float32(4) - ramp), 0, 1)
        turned[channel] = (value - colourfulness * lack + np.float32(0.5)).astype(np.uint8)
    return turned
