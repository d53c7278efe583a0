"""Where a picture is cut: the middle, a random place, or around a face; mirrored or not. A function of its size and use."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple, Protocol

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
    cover = max(bucket.height / height, bucket.width / width)
    low = max(cover, min(1.0, side / (face.size * most)))
    high = max(low, min(1.0, side / (face.size * least)))
    scale = low + (high - low) * stream.uniform()
    resized_wh = int(width * scale + 0.5), int(height * scale + 0.5)

    # where the frame lies, along each axis
    drifts = not recipe.random_crop and least != most and face.size > side // 10 and face.size >= _SMALL_FACE
    starts = []
    for center, length, wanted in zip((face.y, face.x), resized_wh[::-1], (bucket.height, bucket.width), strict=True):
        at = int(center * scale + 0.5)
        start = at - wanted // 2
        if recipe.random_crop:  # two draws: the face stays near the middle more often than not
            reach = max(length - at, at)
            start += stream.integer(reach + 1) + stream.integer(reach + 1) - reach
        elif drifts:
            lowest, highest = -face.size // 20, face.size // 20
            start += lowest + stream.integer(highest - lowest + 1)
        starts.append(max(0, min(start, length - wanted)))
    return CropWindow(replace(fit, resized_wh=resized_wh), starts[1], starts[0], flip, native=True)
