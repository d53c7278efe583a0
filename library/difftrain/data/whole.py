"""Cheap signs that a picture's file has not been cut: its last marker is where the format puts it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

_TAIL = 1 << 16  # cameras append data of their own behind the picture; further than this, decoding has to tell
_PNG_SIGNATURE = 8
_SEGMENTS = 4096  # of a JPEG's head that are followed; sane files have about ten
_MAX_EXIF = 1 << 24


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
