"""Faster decoders than Pillow's for common files, with the same pixels; and cheap signs of what a file is, and that it is whole."""

from __future__ import annotations

import functools
import importlib
import io
import os
import struct
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

_EXIF_FLAG, _XMP_FLAG = 0x08, 0x04
_MAX_EXIF = 1 << 24


class WebpHeader(NamedTuple):
    """The canvas, and the EXIF data where there is some."""

    size_wh: tuple[int, int]
    exif: bytes | None


def read_webp_header(file: BinaryIO) -> WebpHeader | None:
    """Read the header of a WebP; None for what only Pillow can tell (damage, orientation in XMP)."""
    file.seek(0)
    head = file.read(30)
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    kind = head[12:16]
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", head[26:30])
        return WebpHeader((width & 0x3FFF, height & 0x3FFF), None)
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return WebpHeader(((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1), None)
    if kind == b"VP8X" and not head[20] & _XMP_FLAG:
        size = int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
        return WebpHeader(size, _exif(file) if head[20] & _EXIF_FLAG else None)
    return None


def _exif(file: BinaryIO) -> bytes | None:
    """Find the EXIF chunk, which stands behind the pixels."""
    at = 12
    while True:
        file.seek(at)
        head = file.read(8)
        if len(head) < 8:
            return None
        kind, length = struct.unpack("<4sI", head)
        if kind == b"EXIF":
            return file.read(length) if length <= _MAX_EXIF else None
        at += 8 + length + (length & 1)


_TAIL = 1 << 16  # cameras append data of their own behind the picture; further than this, decoding has to tell
_PNG_SIGNATURE = 8
_SEGMENTS = 4096  # of a JPEG's head that are followed; sane files have about ten


def seems_whole(file: BinaryIO, form: str) -> bool:
    """Return True where the end of a JPEG, PNG, WebP or GIF is there, False where only decoding can tell."""
    size = file.seek(0, os.SEEK_END)
    check = {"JPEG": _jpeg, "MPO": _jpeg, "PNG": _png, "WEBP": _webp, "GIF": _gif}.get(form)
    return check is not None and check(file, size)


def late_exif(file: BinaryIO) -> bytes | None:
    """Return the EXIF chunk of a PNG, wherever it stands."""
    for kind, offset, length in _png_chunks(file):
        if kind == b"eXIf" and length <= _MAX_EXIF:
            file.seek(offset)
            return file.read(length)
    return None


def _jpeg(file: BinaryIO, size: int) -> bool:
    scan = _jpeg_scan(file)  # a thumbnail before it has an end mark of its own
    for length in (2, _TAIL):  # nearly always the last two bytes
        start = max(scan, size - length)
        file.seek(start)
        if b"\xff\xd9" in file.read(size - start):
            return True
    return False


def _jpeg_scan(file: BinaryIO) -> int:
    """Return where the compressed pixels begin: behind the segments, each of which tells its length."""
    at = 2
    for _ in range(_SEGMENTS):
        file.seek(at)
        head = file.read(4)
        if len(head) < 4:
            break
        if head[0] != 0xFF or head[1] in (0xFF, 0x01) or 0xD0 <= head[1] <= 0xD7:  # stuffing, marks without length
            at += 1 if head[0] != 0xFF or head[1] == 0xFF else 2
            continue
        at += 2 + int.from_bytes(head[2:], "big")
        if head[1] == 0xDA:
            break
    return at


def _png(file: BinaryIO, size: int) -> bool:
    return any(kind == b"IEND" and offset + length + 4 <= size for kind, offset, length in _png_chunks(file))


def _png_chunks(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Iterate over (type, offset of the data, its length), reading 8 bytes of each chunk."""
    at = _PNG_SIGNATURE
    while True:
        file.seek(at)
        head = file.read(8)
        if len(head) < 8:
            return
        length, kind = struct.unpack(">I4s", head)
        yield kind, at + 8, length
        at += 12 + length


def _webp(file: BinaryIO, size: int) -> bool:
    file.seek(4)
    return int.from_bytes(file.read(4), "little") + 8 <= size


def _gif(file: BinaryIO, size: int) -> bool:
    length = min(size, 1024)
    file.seek(size - length)
    return file.read(length).rstrip(b"\0").endswith(b";")


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
    fast = _decode_with(decoder, image, data) if decoder != HOST and shrink == 1 else None
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


def _decode_with(decoder: str, image: Image.Image, data: bytes) -> np.ndarray | None:
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
