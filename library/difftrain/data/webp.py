"""The size of a WebP from its first bytes: Pillow reads the whole file before it tells."""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

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
