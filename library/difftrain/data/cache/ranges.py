"""Bytes of segments on an object store, by ranges, from a bounded local copy where they are there.

An entry that is read as a whole is brought and kept as it is: random reads of large samples would bring far more in fixed
blocks. Small ones are brought and kept in blocks of BLOCK bytes, for there the way costs more than the bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from difftrain.config.stores import shown
from difftrain.contracts import TrainingFault
from difftrain.data.cache.copies import Copies, Copy
from difftrain.data.cache.fetching import GONE, Patience, Store, in_parallel
from difftrain.data.cache.folder import BIN, PART

BLOCK = 256 << 10
WHOLE = BLOCK // 2  # an entry from this size on is brought by itself
_OPEN = 128  # copies that are held open; more are held in memory
_ALIVE_S = 3600.0


class Piece(NamedTuple):
    """What is brought at once: an entry, or a block, which the end of a segment may cut short."""

    segment: str
    start: int
    size: int

    @property
    def name(self) -> str:
        """Return the name of its copy."""
        return f"{self.segment}-{self.start:x}-{self.size:x}"


class RemoteSegments:
    """Read segments as reader.py wants to: whole entries are asked for, then read in parts. Picklable."""

    def __init__(self, url: str, patience: Patience, copies: Copies, state: Path) -> None:
        """Prepare. state: the folder of the state that is read, which must not be removed meanwhile."""
        self._store, self._copies, self._state = Store(url, patience), copies, state
        self._held: dict[str, tuple[list[int], list[Copy | memoryview]]] = {}  # segment -> starts, ascending; contents
        self._names: dict[str, str] = {}
        self._said_alive = -_ALIVE_S

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteSegments, (self._store.url, self._store.patience, self._copies, self._state)

    def want(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Bring entries, several at once, and hold them until the next call. Raises TrainingFault.

        ranges: segment, offset, length of each.
        """
        self._stay_alive()
        wanted: dict[Piece, int] = {}
        for each in ranges:
            for piece, least in _pieces(*each):
                wanted[piece] = max(least, wanted.get(piece, 0))
        self._held = {}
        found = self._bring(wanted)
        for piece in sorted(found):
            starts, contents = self._held.setdefault(piece.segment, ([], []))
            starts.append(piece.start)
            contents.append(found[piece])

    def read(self, segment: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill buffers one after another with the bytes from an offset on. Raises TrainingFault."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        length = sum(map(len, views))
        starts, contents = self._held.get(segment, ([], []))
        which = bisect_right(starts, offset) - 1
        if which >= 0 and _fill(contents[which], offset - starts[which], views, length):
            return
        start = 0
        joined = self._joined(segment, offset, length)
        for view in views:
            view[:] = joined[start : start + len(view)]
            start += len(view)

    def forget(self, segment: str, offset: int, length: int) -> bool:
        """Drop local copies of an entry that is not whole and bring it anew. Raises TrainingFault."""
        for piece, _ in _pieces(segment, offset, length):
            self._copies.drop(piece.name)
        self.want([(segment, offset, length)])
        return True

    def _joined(self, segment: str, offset: int, length: int) -> memoryview:
        """Return bytes of several blocks: of a small entry, or of nobody knows which."""
        wanted = dict(_blocks(segment, offset, length))
        starts, contents = self._held.get(segment, ([], []))
        held = {piece: contents[starts.index(piece.start)] for piece in wanted if piece.start in starts}
        found = held | self._bring({piece: least for piece, least in wanted.items() if piece not in held})
        joined = bytearray(sum(wanted.values()))
        place = 0
        for piece, least in wanted.items():
            part = memoryview(joined)[place : place + least]
            if not _fill(found[piece], 0, [part], least):
                self._copies.drop(piece.name)
                part[:] = self._ask(piece, least)[:least]
            place += least
        begin = offset - min(piece.start for piece in wanted)
        return memoryview(joined)[begin : begin + length]

    def _bring(self, wanted: dict[Piece, int]) -> dict[Piece, Copy | memoryview]:
        """Return pieces, from the local copies or the store."""
        found: dict[Piece, Copy | memoryview] = {}
        for piece, least in wanted.items():
            copy = self._copies.open(piece.name)
            if copy is not None and copy.size >= least:
                found[piece] = copy if len(found) < _OPEN else copy.content()
        missing = [piece for piece in wanted if piece not in found]
        brought = in_parallel([partial(self._fetched, piece, wanted[piece]) for piece in missing])
        return found | dict(zip(missing, brought, strict=True))

    def _fetched(self, piece: Piece, least: int) -> memoryview:
        content = self._ask(piece, least)
        self._copies.put(piece.name, content)
        return memoryview(content)

    def _ask(self, piece: Piece, least: int) -> bytes:
        known = self._names.get(piece.segment)
        sealed = f"segments/{piece.segment}{BIN}"
        stop = piece.start + piece.size
        for name in [known] if known else [sealed, sealed + PART]:
            with contextlib.suppress(*GONE):
                content = self._store.read(name, piece.start, stop, least)
                self._names[piece.segment] = name
                return content
        raise TrainingFault(
            f"{shown(self._store.url)}/{sealed} is gone, bytes {piece.start:,} to {stop:,} of it are wanted. Copy the "
            "cache to the store again, with all its segments"
        )

    def _stay_alive(self) -> None:
        """Let others see that this state is in use."""
        if time.monotonic() - self._said_alive > _ALIVE_S:
            self._said_alive = time.monotonic()
            self._copies.touch()
            with contextlib.suppress(OSError):
                os.utime(self._state)


def _fill(content: Copy | memoryview, at: int, views: list[memoryview], length: int) -> bool:
    """Fill buffers from a place on; tell whether there is enough."""
    if isinstance(content, Copy):
        return content.fill(at, views, length)
    if len(content) - at < length:
        return False
    for view in views:
        view[:] = content[at : at + len(view)]
        at += len(view)
    return True


def _pieces(segment: str, offset: int, length: int) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces that an entry is brought in, and how many bytes of each there must be."""
    if length >= WHOLE:
        yield Piece(segment, offset, length), length
    else:
        yield from _blocks(segment, offset, length)


def _blocks(segment: str, offset: int, length: int) -> Iterator[tuple[Piece, int]]:
    stop = offset + max(length, 1)
    for start in range(offset // BLOCK * BLOCK, stop, BLOCK):
        yield Piece(segment, start, BLOCK), min(BLOCK, stop - start)
