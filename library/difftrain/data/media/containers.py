"""What a file of moving pictures is, and that it ends where it should, by its first bytes and the heads of its parts."""

from __future__ import annotations

import io
import os
import struct
from typing import BinaryIO, NamedTuple

from difftrain.data.media.media import Unusable

__all__ = ["Animation", "container_of", "is_animated", "read_animation", "refuse_cut_short"]

_STILLS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"hevc", b"heim", b"heis", b"jxl ", b"crx ")
_ATOMS = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_QUICK_MS, _QUICK_SHOWN_MS = 10, 100  # delays of 10 ms and less are shown as 100 by every browser: few mean them
_MAX_PARTS = 1 << 20


def container_of(head: bytes) -> str | None:
    """Name a video container by its first 64 bytes; None for anything else."""
    if head[:4] == _EBML:
        return "webm" if b"webm" in head[:64] else "mkv"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    kind = head[4:8]
    if kind == b"ftyp" and len(head) >= 12:
        brand = head[8:12]
        if brand in _STILLS:
            return None
        return "mov" if brand == b"qt  " else "3gp" if brand[:2] == b"3g" else "mp4"
    return "mov" if kind in _ATOMS and head[:4] != b"\0\0\0\0" else None


def refuse_cut_short(file: BinaryIO, name: str) -> None:
    """Refuse a file that is shorter than its outermost parts say. Raises: Unusable."""
    size = file.seek(0, os.SEEK_END)
    if name == "avi":
        file.seek(4)
        ends = 8 + int.from_bytes(file.read(4), "little")
        if ends - size > 1 and ends != 8:  # writers that were stopped leave 0; padding is often forgotten
            raise Unusable("truncated", f"{size:,} bytes of {ends:,}")
    elif name in ("webm", "mkv"):
        segment = _segment_end(file)
        if segment is not None and segment > size:
            raise Unusable("truncated", f"{size:,} bytes of {segment:,}")
    else:
        _refuse_cut_atoms(file, size)


def _segment_end(file: BinaryIO) -> int | None:
    """Return where Matroska's segment should end; None where its writer did not know."""
    file.seek(4)
    header = _vint(file)
    if header is None:
        return None
    file.seek(header, os.SEEK_CUR)
    if file.read(4) != _SEGMENT:
        return None
    length = _vint(file)
    return None if length is None else file.tell() + length


def _vint(file: BinaryIO) -> int | None:
    first = file.read(1)
    if not first or first == b"\0":
        return None
    more = 8 - first[0].bit_length()
    raw = bytes([first[0] & (0x7F >> more)]) + file.read(more)
    value = int.from_bytes(raw, "big")
    return None if len(raw) <= more or value == (1 << 7 * (more + 1)) - 1 else value


def _refuse_cut_atoms(file: BinaryIO, size: int) -> None:
    at, seen = 0, set()
    for _ in range(_MAX_PARTS):
        file.seek(at)
        head = file.read(16)
        if len(head) < 8:
            break
        length, kind = struct.unpack(">I4s", head[:8])
        seen.add(kind)
        if length == 0:  # to the end
            return
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if length < 8:
            break
        at += length
        if at > size:
            raise Unusable("truncated", f"{size:,} bytes, its part {kind.decode('latin-1')!r} ends at {at:,}")
    if b"moov" not in seen:
        raise Unusable("truncated", "it has no index (moov): the end of the file is missing, or it was not finished")


# ---------------------------------------------------------------------- animated pictures


class Animation(NamedTuple):
    """The milliseconds that each frame of an animated GIF or WebP is shown."""

    format: str
    durations_ms: tuple[int, ...]


def is_animated(head: bytes) -> bool:
    """Tell an animated GIF or WebP by its first bytes: for sure where they hold two frames, else by its timing."""
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X":
        return len(head) > 20 and bool(head[20] & 2)
    if head[:4] != b"GIF8":
        return False
    frames, timed, ended = _gif_parts(io.BytesIO(head))
    return len(frames) > 1 or (not ended and timed)


def read_animation(file: BinaryIO) -> Animation:
    """Walk through the parts of an animated GIF or WebP without decoding. Raises: Unusable."""
    file.seek(0)
    head = file.read(16)
    file.seek(0)
    if head[:4] == b"RIFF":
        return Animation("webp", tuple(_webp_delays(file)))
    delays, _, ended = _gif_parts(file)
    if not ended:
        raise Unusable("truncated", f"it ends within or after frame {len(delays)}")
    if not delays:
        raise Unusable("no frames", "no frame is in it")
    return Animation("gif", tuple(_shown(delay) for delay in delays))


def _shown(delay_ms: int) -> int:
    return _QUICK_SHOWN_MS if delay_ms <= _QUICK_MS else delay_ms


def _gif_parts(file: BinaryIO) -> tuple[list[int], bool, bool]:
    """Return the delays of the frames in ms, whether there is timing at all, and whether the end was reached."""
    delays: list[int] = []
    delay, timed = 0, False
    head = file.read(13)
    if len(head) == 13 and head[10] & 0x80:
        file.read(3 << ((head[10] & 7) + 1))
    while True:
        kind = file.read(1)
        if kind == b";":
            return delays, timed, True
        if kind == b"!":
            label = file.read(1)
            first = _sub_blocks(file)
            if first is None:
                return delays, timed, False
            if label == b"\xf9" and len(first) >= 4:
                delay = 10 * int.from_bytes(first[1:3], "little")
                timed |= delay > 0
            timed |= label == b"\xff" and first.startswith((b"NETSCAPE2.0", b"ANIMEXTS1.0"))
        elif kind == b",":
            descriptor = file.read(9)
            if len(descriptor) < 9:
                return delays, timed, False
            delays.append(delay)
            delay = 0
            if descriptor[8] & 0x80:
                file.read(3 << ((descriptor[8] & 7) + 1))
            file.read(1)
            if _sub_blocks(file) is None:
                return delays, timed, False
        elif kind == b"\0" and delays:  # stuffing between blocks
            continue
        else:
            return delays, timed, False


def _sub_blocks(file: BinaryIO) -> bytes | None:
    """Pass over sub-blocks and return the first; None where the file ends in them."""
    first: bytes | None = None
    while True:
        length = file.read(1)
        if not length:
            return None
        if length == b"\0":
            return first if first is not None else b""
        block = file.read(length[0])
        if len(block) < length[0]:
            return None
        first = block if first is None else first


def _webp_delays(file: BinaryIO) -> list[int]:
    size = file.seek(0, os.SEEK_END)
    file.seek(4)
    ends = 8 + int.from_bytes(file.read(4), "little")
    if ends > size:
        raise Unusable("truncated", f"{size:,} bytes of {ends:,}")
    at, delays = 12, []
    while at + 8 <= ends:
        file.seek(at)
        kind, length = struct.unpack("<4sI", file.read(8))
        if kind == b"ANMF":
            delays.append(_shown(int.from_bytes(file.read(16)[12:15], "little")))
        at += 8 + length + (length & 1)
    if not delays:
        raise Unusable("no frames", "no frame is in it")
    return delays
