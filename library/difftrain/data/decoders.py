"""Faster decoders than Pillow's for common files, with the same pixels; Pillow does whatever they don't take.

Measured on one core (benchmarks/decode.py): simplejpeg 1.2 to 2.6 x Pillow's full decode of JPEG, imagecodecs 1.3 to
1.5 x for PNG and 1.8 to 2.5 x for WebP. A JPEG that is to become much smaller is decoded at 1/2, 1/4 or 1/8 of its size
out of its DCT blocks (libjpeg's scaled decoding), by either decoder with the same pixels. What a decoder refuses, also
for damage, goes to Pillow, whose verdict counts.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from difftrain.data.whole import seems_whole

HOST = "host"
DECODERS = {"device": "difftrain.device.jpeg:decode"}  # of JPEG, beside the host's own; differ by 2/255 at most
_JPEG = ("JPEG", "MPO")
_SHRINKS = (8, 4, 2)
_ODD = frozenset({"transparency", "interlace", "icc_profile"})


def shrink_of(image: Image.Image, least_wh: tuple[int, int], spare: float = 1.0) -> int:
    """Return by how much a picture can be made smaller while it is decoded: 1, 2, 4 or 8; JPEG only.

    least_wh: what must be left of it, as it lies in the file; where it is made smaller more than twice, `spare` times
    that. What is left out is averaged, as area resizing does: sharper filters want something left to work on.
    """
    if image.format not in _JPEG or image.mode not in ("RGB", "L"):
        return 1
    width, height = least_wh
    for by in _SHRINKS:
        more = spare if by > 2 else 1.0
        left = _reduced(image.size, by)
        if left[0] >= width * more and left[1] >= height * more:
            return by
    return 1


def pixels(image: Image.Image, data: bytes, shrink: int = 1, decoder: str = HOST) -> Image.Image | np.ndarray:
    """Decode an opened picture, made smaller by `shrink`. Raises whatever Pillow does for damaged files.

    decoder: of JPEG in its full size; what it refuses, and all else, is the host's.
    Shape of an array: (H, W), (H, W, 3) or (H, W, 4) uint8, in the picture's mode.
    """
    fast = _other(decoder, image, data) if decoder != HOST and shrink == 1 else None
    if fast is None:
        fast = _fast(image, data, shrink)
    if fast is not None:
        return fast
    if shrink > 1:
        image.draft(image.mode, (image.width // shrink, image.height // shrink))
    image.load()
    return image


def _fast(image: Image.Image, data: bytes, shrink: int) -> np.ndarray | None:
    size = _reduced(image.size, shrink)
    return _checked(image, size, lambda: _array(image, data, size))


def _other(decoder: str, image: Image.Image, data: bytes) -> np.ndarray | None:
    if image.format not in _JPEG or image.mode not in ("RGB", "L"):
        return None
    module, _, attribute = DECODERS[decoder].partition(":")
    decode = getattr(importlib.import_module(module), attribute)
    return _checked(image, image.size, lambda: decode(data, image.mode == "L"))


def _checked(image: Image.Image, size: tuple[int, int], decode: Callable[[], np.ndarray | None]) -> np.ndarray | None:
    """Return what a decoder makes, if it is what the header says."""
    try:
        array = decode()
    except Exception:  # each library has its own errors; Pillow says what is wrong, or reads it
        return None
    channels = {"L": 1, "RGB": 3, "RGBA": 4}.get(image.mode)
    if array is None or array.dtype != np.uint8 or (array.shape[2] if array.ndim == 3 else 1) != channels:
        return None
    array = array[..., 0] if channels == 1 and array.ndim == 3 else array
    return array if array.shape[1::-1] == size else None


def _array(image: Image.Image, data: bytes, size_wh: tuple[int, int]) -> np.ndarray | None:
    if image.format in _JPEG and image.mode in ("RGB", "L") and (jpeg := _module("simplejpeg")):
        kind = "RGB" if image.mode == "RGB" else "GRAY"
        return jpeg.decode_jpeg(data, kind, min_width=size_wh[0], min_height=size_wh[1], min_factor=1, strict=True)
    if (
        image.format == "PNG"
        and not _is_odd(image)
        and seems_whole(io.BytesIO(data), "PNG")
        and (codecs := _module("imagecodecs"))
    ):
        return codecs.png_decode(data)
    if image.format == "WEBP" and not _is_odd(image) and (codecs := _module("imagecodecs")):
        return codecs.webp_decode(data)
    return None


def _is_odd(image: Any) -> bool:
    """Tell of animations, of transparency that is not an alpha channel, and of what libpng prints warnings about."""
    return bool(getattr(image, "is_animated", False)) or not _ODD.isdisjoint(image.info)


def _reduced(size_wh: tuple[int, int], by: int) -> tuple[int, int]:
    return -(-size_wh[0] // by), -(-size_wh[1] // by)


@functools.cache
def _module(name: str) -> ModuleType | None:
    """Import an optional package once a process."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
