"""Aspect buckets with kohya's meaning: which shape a picture gets, how it is resized, where it is cut.

Sizes in here are (width, height), as kohya writes them; a Bucket is (height, width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Bucket, ConfigFault, Fault

if TYPE_CHECKING:
    from difftrain.config.schema.sections import SizeSection

_CHUNK = 1 << 15
Size = tuple[int, int]


@dataclass(frozen=True)
class Fit:
    """How one picture becomes its bucket: resized to `resized_wh`, then cut at `crop` = (left, top)."""

    original_wh: Size
    bucket: Bucket
    resized_wh: Size
    crop: tuple[int, int]  # the middle; a random crop cuts elsewhere in the same resized picture

    @property
    def original_ltrb(self) -> tuple[float, float, float, float]:
        """Return (left, top, right, bottom) of kohya's micro-conditioning: the picture fitted into its bucket.

        It is no crop of the resized picture; a random crop doesn't show in it either, as in kohya.
        """
        width, height = self.bucket.width, self.bucket.height
        ratio = self.original_wh[0] / self.original_wh[1]
        if width / height > ratio:
            fitted_w, fitted_h = height * ratio, float(height)
        else:
            fitted_w, fitted_h = float(width), width / ratio
        left, top = (width - fitted_w) // 2, (height - fitted_h) // 2
        return left, top, left + fitted_w, top + fitted_h

    def top_left(self, flipped: bool = False) -> tuple[int, int]:
        """Return SDXL's crop_top_left as (top, left); mirrored, left is the distance from the other side."""
        left, top, right, _ = self.original_ltrb
        return int(top), int(self.bucket.width - right) if flipped else int(left)

    @property
    def original_hw(self) -> tuple[int, int]:
        """Return SDXL's original_size."""
        return self.original_wh[1], self.original_wh[0]

    @property
    def target_hw(self) -> tuple[int, int]:
        """Return SDXL's target_size."""
        return self.bucket.height, self.bucket.width


def make_resolutions(max_reso: Size, min_size: int, max_size: int, steps: int) -> list[Size]:
    """List the bucket sizes (width, height) whose area stays within that of max_reso, sides in multiples of `steps`."""
    area = max_reso[0] * max_reso[1]
    side = int(math.sqrt(area) // steps) * steps
    sizes = {(side, side)}
    for width in range(min_size, max_size + 1, steps):
        height = min(max_size, area // width // steps * steps)
        if height >= min_size:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


@dataclass(frozen=True)
class BucketTable:
    """Choose buckets for one resolution. Picklable.

    sizes: those to choose from, in order; empty with no_upscale, where every picture is only ever made smaller and its
    bucket is what is left of it in whole steps. listed: they were given one by one, and the nearest is that whose aspect
    ratio is nearest in log space, the first of several.
    """

    sizes: tuple[Size, ...]
    max_area: int
    steps: int
    no_upscale: bool = False
    notes: tuple[str, ...] = ()
    listed: bool = False

    @classmethod
    def of(cls, data: SizeSection) -> BucketTable:
        """Make the table that a configuration asks for; `notes` says what was rounded or is ignored.

        Raises: ConfigFault for limits that contradict the resolution.
        """
        if data.sizes:
            return cls(data.sizes, max(width * height for width, height in data.sizes), 1, listed=True)
        if data.resolution is None:
            raise ConfigFault([Fault(option("data.resolution"), "is missing", "give width,height or one number")])
        width, height = data.resolution
        if not data.enable_bucket:
            return cls(((width, height),), width * height, 1)
        steps = data.bucket_reso_steps
        if data.bucket_no_upscale:
            note = "bucket_no_upscale: min_bucket_reso and max_bucket_reso have no effect"
            return cls((), width * height, steps, True, (note,))
        # Below one step kohya's rounding would leave 0, on which it fails: there the side is taken as it is.
        low = data.min_bucket_reso // steps * steps or data.min_bucket_reso
        high, notes = -(-data.max_bucket_reso // steps) * steps, []
        for name, requested, used in (("min", data.min_bucket_reso, low), ("max", data.max_bucket_reso, high)):
            if requested != used:
                notes.append(
                    f"{name}_bucket_reso {requested} is not a multiple of bucket_reso_steps {steps}: {used} is used"
                )
        _check_limits(data.resolution, low, high, steps)
        return cls(
            tuple(make_resolutions((width, height), low, high, steps)), width * height, steps, False, tuple(notes)
        )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets to choose from, in the order of `sizes`."""
        return tuple(Bucket(height, width) for width, height in self.sizes)

    @cached_property
    def _ratios(self) -> np.ndarray:
        return np.array([width / height for width, height in self.sizes])

    def _far(self, ratio: np.ndarray | float) -> np.ndarray:
        """Return how far each bucket is from aspect ratios, in numbers that are only compared. Exact on every machine.

        Listed ones by the factor between the ratios, which grows with their distance in log space. Shape: (sizes, N).
        """
        ratios = self._ratios[:, None]
        distance: np.ndarray = np.maximum(ratios / ratio, ratio / ratios) if self.listed else np.abs(ratios - ratio)
        return distance

    def fits(self, size_wh: Size) -> bool:
        """Tell whether there is a bucket: with no_upscale, not for a picture that is narrower than one step."""
        if not self.no_upscale:
            return True
        width, height = self._shrunk(np.array([size_wh[0]]), np.array([size_wh[1]]))
        return min(int(width[0]), int(height[0])) >= self.steps

    def select(self, size_wh: Size) -> Fit:
        """Choose the bucket of a picture and how it gets there.

        Raises: ValueError where none fits.
        """
        width, height = size_wh
        ratio = width / height
        if self.no_upscale:
            wide, high = self._shrunk(np.array([width]), np.array([height]))
            resized = int(wide[0]), int(high[0])
            reso = (resized[0] - resized[0] % self.steps, resized[1] - resized[1] % self.steps)
            if not min(reso):
                raise ValueError(f"{width} x {height} px: no bucket in steps of {self.steps} without enlarging")
        else:
            same = size_wh in self.sizes and not self.listed
            reso = size_wh if same else self.sizes[int(self._far(ratio)[:, 0].argmin())]
            scale = reso[1] / height if ratio > reso[0] / reso[1] else reso[0] / width
            resized = (int(width * scale + 0.5), int(height * scale + 0.5))
        crop = ((resized[0] - reso[0]) // 2, (resized[1] - reso[1]) // 2)
        return Fit((width, height), Bucket(reso[1], reso[0]), resized, crop)

    def select_many(self, widths: np.ndarray, heights: np.ndarray) -> tuple[list[Bucket], np.ndarray]:
        """Choose buckets for many pictures at once.

        Returns: the buckets, and for each picture the ordinal of its own (N,) int32, -1 where none fits.
        """
        if self.no_upscale:
            return self._select_shrunk(widths, heights)
        ordinals = np.empty(len(widths), dtype=np.int32)
        for start in range(0, len(widths), _CHUNK):
            width = np.asarray(widths[start : start + _CHUNK], dtype=np.int64)
            height = np.asarray(heights[start : start + _CHUNK], dtype=np.int64)
            nearest = self._far(width / height).argmin(axis=0)
            # a picture of a bucket's very size goes there
            for ordinal, (w, h) in () if self.listed else enumerate(self.sizes):
                nearest[(width == w) & (height == h)] = ordinal
            ordinals[start : start + _CHUNK] = nearest
        return list(self.buckets), ordinals

    def _select_shrunk(self, widths: np.ndarray, heights: np.ndarray) -> tuple[list[Bucket], np.ndarray]:
        packed = np.empty(len(widths), dtype=np.uint64)
        for start in range(0, len(widths), _CHUNK):
            part = slice(start, start + _CHUNK)
            width, height = self._shrunk(np.asarray(widths[part], np.int64), np.asarray(heights[part], np.int64))
            size = (width - width % self.steps) << 32 | (height - height % self.steps)
            packed[part] = np.where(np.minimum(width, height) < self.steps, 0, size)
        distinct, ordinals = np.unique(packed, return_inverse=True)
        none = int(len(distinct) > 0 and distinct[0] == 0)
        buckets = [Bucket(size & 0xFFFFFFFF, size >> 32) for size in distinct[none:].tolist()]
        return buckets, (ordinals - none).astype(np.int32)

    def _shrunk(self, width: np.ndarray, height: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sizes that pictures are made smaller to: the area, then one side in whole steps.

        Of the two ways to round, the one that is nearer to the picture's own shape. Never enlarges.
        """
        ratio = width / height
        ideal_w = np.sqrt(self.max_area * ratio)
        by_width, by_height = self._rounded(ideal_w), self._rounded(self.max_area / ideal_w)
        height_of, width_of = self._rounded(by_width / ratio), self._rounded(by_height * ratio)
        with np.errstate(divide="ignore", invalid="ignore"):  # thinner than a step: the other way, or no bucket
            wins = np.abs(by_width / height_of - ratio) < np.abs(width_of / by_height - ratio)
        shrunk_w = np.where(wins, by_width, (by_height * ratio + 0.5).astype(np.int64))
        shrunk_h = np.where(wins, (by_width / ratio + 0.5).astype(np.int64), by_height)
        stays = width * height <= self.max_area
        return np.where(stays, width, shrunk_w), np.where(stays, height, shrunk_h)

    def _rounded(self, side: np.ndarray) -> np.ndarray:
        nearest = (side + 0.5).astype(np.int64)
        return nearest - nearest % self.steps


def _check_limits(resolution: Size, low: int, high: int, steps: int) -> None:
    faults = []

    # --- the resolution lies between the limits
    if min(resolution) < low:
        faults.append(
            Fault(
                option("data.min_bucket_reso"),
                f"{low} is above the shorter side of {option('data.resolution')}, {min(resolution)}",
                "lower it",
            )
        )
    if max(resolution) > high:
        faults.append(
            Fault(
                option("data.max_bucket_reso"),
                f"{high} is below the longer side of {option('data.resolution')}, {max(resolution)}",
                "raise it",
            )
        )

    # --- a bucket is at least one step wide
    if math.isqrt(resolution[0] * resolution[1]) < steps:
        faults.append(
            Fault(
                option("data.bucket_reso_steps"),
                f"{steps} is above {option('data.resolution')}",
                "take smaller steps",
            )
        )
    if faults:
        raise ConfigFault(faults)
