"""Masks of the loss: a picture's own alpha, or the red channel of a picture of the same name in another folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from difftrain.contracts import Record
from difftrain.data.media.crop import CropWindow, resize
from difftrain.data.media.media import Unusable, decode_rgba
from difftrain.data.sources.base import IMAGE_SUFFIXES, picture_name, read_image, split_suffix

NO_MASK = "no mask"  # kind of the reason
_SAME_SHAPE = 0.01  # how far the aspect ratio of a mask may be off its picture's
_ORDER = (".png", *sorted(IMAGE_SUFFIXES - {".png"}))


def find_mask(folder: Path, name: str) -> Path:
    """Find the mask of an item: at the same relative path, else by its bare name; any picture suffix.

    name: relative path, or the name of a member. Raises: Unusable.
    """
    for stem in stems_of(name):
        if (path := picture_at(folder, stem)) is not None:
            return path
    raise Unusable(NO_MASK, f"{folder} holds no image named {split_suffix(name)[0]}")


def stems_of(name: str) -> Iterator[str]:
    """Yield by what the companion of an item is called in another folder: its relative path without a suffix, its bare name."""
    stem = split_suffix(name)[0]
    bare = stem.rpartition("/")[2]
    leads_out = stem.startswith("/") or ".." in stem.split("/")  # a picture elsewhere would be found as its own mask
    yield from dict.fromkeys((bare,) if leads_out else (stem, bare))


def picture_at(folder: Path, stem: str) -> Path | None:
    """Return the picture of a folder that is called so, whatever its suffix; None where there is none."""
    return next((path for suffix in _ORDER if (path := folder / f"{stem}{suffix}").is_file()), None)


@dataclass(frozen=True)
class Masks:
    """Where the masks of a source lie. folder: by the pictures' names; default: of those that have none there.

    optional: a picture without any counts as a whole.
    """

    folder: str = ""
    default: str = ""
    optional: bool = False

    def find(self, name: str) -> Path | None:
        """Find the mask of an item; None where it counts as a whole. Raises Unusable where it must have one."""
        try:
            if self.folder:
                return find_mask(Path(self.folder).expanduser(), name)
        except Unusable:
            if not (self.default or self.optional):
                raise
        return Path(self.default).expanduser() if self.default else None

    def decode(self, path: Path, data: bytes, size_hw: tuple[int, int]) -> np.ndarray:
        """Decode the bytes of a mask: the red channel; alpha is dropped (kohya). Shape: (h, w) uint8.

        size_hw: of its picture, whose shape it must have; one for all pictures is stretched. Raises Unusable.
        """
        is_default = bool(self.default) and path == Path(self.default).expanduser()
        return _red(path, data) if is_default else decode_mask(path, data, size_hw)

    def read(self, record: Record) -> np.ndarray | None:
        """Read the mask of a record; None where it counts as a whole. Shape: (h, w) uint8.

        Raises: Unusable or OSError where it is missing, no picture, or of another shape than its picture.
        """
        path = self.find(picture_name(record))
        return None if path is None else self.decode(path, read_image(path), record.size_hw)


def decode_mask(path: Path, data: bytes, size_hw: tuple[int, int]) -> np.ndarray:
    """Decode the bytes of a picture's own mask: the red channel. size_hw: of the picture. Raises: Unusable."""
    mask = _red(path, data)
    (height, width), (mask_h, mask_w) = size_hw, mask.shape
    if abs(mask_w * height / (mask_h * width) - 1) > _SAME_SHAPE:
        raise Unusable("other shape", f"the mask {path} has {mask_w} x {mask_h} px, its image {width} x {height}")
    return mask


def _red(path: Path, data: bytes) -> np.ndarray:
    try:
        return decode_rgba(data).pixels[..., 0]
    except Unusable as error:
        raise Unusable(error.kind, f"the mask {path}: {str(error).removeprefix(f'{error.kind}: ')}") from None


def cut_mask(mask: np.ndarray, window: CropWindow, interpolation: str | None) -> np.ndarray:
    """Resize, cut and mirror a mask as its picture is. Shape: (h, w) uint8 -> (1, H, W) uint8."""
    left, top, width, height = window.crop
    cut = resize(mask, window.fit.resized_wh, interpolation)[top : top + height, left : left + width]
    return np.array(cut[None, :, ::-1] if window.flip else cut[None], order="C")


def fit_mask(mask: np.ndarray, window: CropWindow, interpolation: str | None) -> np.ndarray:
    """Fit a mask as cut_mask does. Shape: (h, w) uint8 -> (1, H, W) fp32 in 0..1."""
    return cut_mask(mask, window, interpolation).astype(np.float32) / np.float32(255)
