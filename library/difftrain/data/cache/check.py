"""Reading one segment from end to end: what of it is whole, and by name what is not.

Everything in both files is covered: the headers, which are equal, every row by its own checksum, every payload by the
row's, and the zeros between them. The journal is read before the payloads, which are durable before their rows: a segment
that a build is writing is judged by what was committed when its journal was read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.data.cache.folder import BIN, IDX
from difftrain.data.cache.format import ALIGN, REJECT, crc32c, meta_of, rejected
from difftrain.data.cache.torn import MOST_NAMED, Damage, Journal, find, read_journal

_WINDOW = 8 << 20
_HEAD_OF_PAYLOAD = 1 << 16
_TUPLES = 1 << 14


@dataclass
class Checked:
    """What was found in one segment."""

    name: str
    bytes: int = 0
    entries: int = 0  # that are whole and count
    bad: list[int] = field(default_factory=list)  # offsets of committed entries that are not whole
    rewrite: bool = False  # what is whole must go to other files: these cannot be believed any more
    damages: list[Damage] = field(default_factory=list)
    unnamed: int = 0  # damaged entries beyond those that are named

    def add(self, damage: Damage, *, rewrite: bool = False) -> None:
        """Take note of a damage; rewrite: it is of the files rather than of entries."""
        self.rewrite |= rewrite
        if len(self.damages) < MOST_NAMED or rewrite:
            self.damages.append(damage)
        else:
            self.unnamed += 1


def check_segment(segments: Path, name: str, dropped: np.ndarray) -> tuple[Checked, Journal]:
    """Read a segment to its end. dropped: sorted offsets of entries that do not count any more."""
    journal = read_journal(segments, name)
    found = Checked(name)
    for damage in journal.damages:
        found.add(damage, rewrite=True)
    counts = ~np.isin(journal.rows["offset"], dropped)
    if journal.bin is None:
        _deleted(journal, found, counts)
        return found, journal
    if journal.idx is None:
        _without_journal(journal, found, segments)
        return found, journal
    try:
        with journal.bin.open("rb", buffering=0) as file:
            _read_through(journal, _Window(file.fileno()), found, counts)
    except FileNotFoundError:  # sealed since its journal was read
        journal.bin = find(segments, name, BIN)
        if journal.bin is None:
            _deleted(journal, found, counts)
        else:
            with journal.bin.open("rb", buffering=0) as file:
                _read_through(journal, _Window(file.fileno()), found, counts)
    return found, journal


def _deleted(journal: Journal, found: Checked, counts: np.ndarray) -> None:
    found.bad = [int(offset) for offset in journal.rows["offset"][counts]]
    if not found.bad and not found.damages:
        return  # what is left of a segment that was taken away on purpose
    says = f"is deleted: {len(found.bad):,} entries are lost"
    found.add(
        Damage("deleted", f"segments/{journal.name}{BIN}", says, journal.name, entries=len(found.bad)), rewrite=True
    )


def _without_journal(journal: Journal, found: Checked, segments: Path) -> None:
    if journal.begun or find(segments, journal.name, IDX) or not find(segments, journal.name, BIN):
        return  # a writer makes its two files one after the other, and a clean-up takes them away so
    says = "has no journal: what it holds cannot be told"
    found.add(Damage("deleted", f"segments/{journal.name}{IDX}", says, journal.name), rewrite=True)


class _Window:
    """Reads a file forwards through one buffer."""

    def __init__(self, fd: int) -> None:
        self.fd, self.size = fd, os.fstat(fd).st_size
        self.buffer = np.empty(_WINDOW, np.uint8)
        self.start = self.stop = 0

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the bytes from start to stop. Raises OSError where they cannot be read."""
        while start < stop:
            if not self.start <= start < self.stop:
                self._fill(start, stop)
            end = min(stop, self.stop)
            yield self.buffer[start - self.start : end - self.start]
            start = end

    def _fill(self, start: int, stop: int) -> None:
        self.start = self.stop = start
        try:
            got = os.preadv(self.fd, [self.buffer.data], start)
        except OSError:  # perhaps behind what is asked for
            got = os.preadv(self.fd, [self.buffer.data[: min(stop - start, _WINDOW)]], start)
        if not got:
            raise OSError(0, "the file ends before")
        self.stop = start + got


def _read_through(journal: Journal, window: _Window, found: Checked, counts: np.ndarray) -> None:
    """Compare every payload that counts with its row, and what lies between with zeros."""
    assert journal.bin is not None
    file = f"segments/{journal.bin.name}"
    order = np.argsort(journal.rows["offset"], kind="stable")
    rows = journal.rows[order]
    # without a header nothing says where the first payload begins, and it is named anyway
    end = journal.first
    whole_journal = not journal.damages
    cut = beyond = 0
    for (address, offset, length, crc, kind, *_), count in zip(some_at_once(rows), counts[order], strict=True):
        stop = offset + length
        if whole_journal and end is not None and end < offset:
            _padding(window, end, min(offset, window.size), file, found)
        end = stop
        beyond += stop > window.size
        found.bytes += length if count else 0
        if not count:
            continue
        if stop > window.size:
            cut += 1
            found.bad.append(offset)
        elif why := _wrong(window, offset, stop, crc):
            found.bad.append(offset)
            record = _record(window, offset, stop, kind)
            word = "checksum" if why.endswith("checksum") else "unreadable"
            found.add(Damage(word, file, why, journal.name, offset, address.hex(), record, 1))
        else:
            found.entries += 1
    if cut:
        says = f"is truncated to {window.size:,} bytes: {cut:,} entries are lost"
        found.add(Damage("truncated", file, says, journal.name, window.size, entries=cut))
    if whole_journal and end is not None and not beyond:
        _tail(window, end, journal, found)


def some_at_once(rows: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Yield rows as tuples, of which few are in memory at a time."""
    for start in range(0, len(rows), _TUPLES):
        yield from rows[start : start + _TUPLES].tolist()


def _tail(window: _Window, end: int, journal: Journal, found: Checked) -> None:
    """A sealed segment ends with its last entry: what stands behind it has lost its rows."""
    assert journal.idx is not None and journal.bin is not None
    file, aligned = f"segments/{journal.bin.name}", -(-end // ALIGN) * ALIGN
    if window.size < aligned:
        says = f"is truncated to {window.size:,} bytes, in the zeros behind its last entry"
        found.add(Damage("truncated", file, says, journal.name, window.size), rewrite=True)
        return
    _padding(window, end, aligned, file, found)
    if journal.sealed and window.size > aligned:
        says = f"the journal is cut: {window.size - aligned:,} bytes of {journal.bin.name} belong to none of its rows"
        found.add(Damage("journal", f"segments/{journal.idx.name}", says, journal.name, aligned), rewrite=True)


def _padding(window: _Window, start: int, stop: int, file: str, found: Checked) -> None:
    try:
        zeros = stop <= start or not any(piece.any() for piece in window.pieces(start, stop))
        why = "bytes between two entries are not zeros"
    except OSError as error:
        zeros, why = False, f"cannot be read: {error.strerror}"
    if not zeros:
        found.add(Damage("padding", file, why, found.name, start), rewrite=True)


def _wrong(window: _Window, start: int, stop: int, crc: int) -> str:
    """Say why a payload is not what was written; nothing where it is."""
    found = 0
    try:
        for piece in window.pieces(start, stop):
            found = crc32c(piece, found)
    except OSError as error:
        return f"an entry cannot be read: {error.strerror}"
    return "" if found == crc else "an entry has a wrong checksum"


def _record(window: _Window, start: int, stop: int, kind: int) -> str:
    """Return the name of a record as far as its damaged entry still tells it."""
    with suppress(Exception):  # whatever stands there now
        head = os.pread(window.fd, min(stop - start, _HEAD_OF_PAYLOAD), start)
        if kind == REJECT:
            return rejected(head)[0]
        meta = meta_of(np.frombuffer(head, np.uint8))
        return str(meta.get("name") or meta.get("caption") or "")
    return ""
