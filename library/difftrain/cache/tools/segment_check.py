"""One segment read from end to end: what its files say, how far that can be believed, and what of it is not whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.cache.store.folder import BIN, IDX, PART
from difftrain.cache.store.format import (
    ALIGN,
    REJECT,
    ROW,
    Damaged,
    crc32c,
    header_block,
    meta_of,
    read_header,
    rejected,
    whole_rows,
)

MOST_NAMED = 100  # damaged entries of a segment that are named one by one; all are counted
_MOST_HEADER = 1 << 20


@dataclass(frozen=True)
class SegmentDamage:
    """One thing that is not as it was written, in words and in parts."""

    kind: str  # deleted, truncated, checksum, unreadable, journal, header, padding, database, drops, uses, missing, foreign
    file: str  # below the cache
    says: str
    segment: str = ""
    offset: int | None = None
    address: str = ""
    record: str = ""
    entries: int = 0  # that are lost by it, as far as is known

    def __str__(self) -> str:
        position = f" at offset {self.offset:,}" if self.offset is not None else ""
        address = f", address {self.address}" if self.address else ""
        record = f", of {self.record!r}" if self.record else ""
        return f"{self.file}{position}: {self.says}{address}{record}"

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


@dataclass
class JournalScan:
    """What a journal says, as far as it can be believed."""

    name: str
    idx: Path | None
    bin: Path | None
    header: dict[str, Any] | None = None
    first: int | None = None  # where the first payload and the first row begin: the size of the header
    sealed: bool = False
    begun: bool = False  # nothing was committed yet
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, ROW))  # those whose checksum is right
    damages: list[SegmentDamage] = field(default_factory=list)


def find(segments: Path, name: str, suffix: str) -> Path | None:
    """Return a file of a segment, sealed or not; None where there is none."""
    paths = (segments / f"{name}{suffix}", segments / f"{name}{suffix}{PART}", segments / f"{name}{suffix}")
    return next((path for path in paths if path.is_file()), None)  # thrice: it may be sealed meanwhile


def read_journal(segments: Path, name: str) -> JournalScan:
    """Read what can be read of a journal. Faults are found, not raised."""
    for pause_s in (0.05, 0.15, 0.0):
        journal = _read_journal(segments, name)
        if journal.sealed or not journal.damages:
            break
        time.sleep(pause_s)  # a build may just be writing it
    return journal


def _read_journal(segments: Path, name: str) -> JournalScan:
    journal, content = JournalScan(name, find(segments, name, IDX), None), b""
    if journal.idx is not None:
        try:
            content = journal.idx.read_bytes()
        except FileNotFoundError:  # sealed between two looks, or gone
            journal.idx = find(segments, name, IDX)
            content = journal.idx.read_bytes() if journal.idx else b""
        except OSError as error:  # a disk that cannot read it any more
            journal.damages.append(
                SegmentDamage("unreadable", f"segments/{journal.idx.name}", str(error.strerror), name)
            )
    journal.sealed = journal.idx is not None and journal.idx.suffix == IDX
    journal.bin = find(segments, name, BIN)
    size = _take_headers(journal, content)
    if journal.idx is not None and size is None and not journal.begun:
        size = _size_by_rows(content)
    if journal.idx is not None and size is not None:
        _take_rows(journal, content[size:])
    return journal


def _take_headers(journal: JournalScan, content: bytes) -> int | None:
    """Judge both headers; return the size of that which is whole."""
    heads = {}
    if journal.bin is not None:
        heads[journal.bin] = _head_of_file(journal.bin)
    if journal.idx is not None:
        heads[journal.idx] = content[:_MOST_HEADER]
    headers: list[tuple[dict[str, Any], int]] = []
    torn = {}
    for path, head in heads.items():
        try:
            facts, size = read_header(head)
            if head[:size] != header_block(facts):
                raise Damaged("its header is incomplete")
            headers.append((facts, size))
        except (Damaged, ValueError, TypeError) as error:
            torn[path] = str(error) if isinstance(error, Damaged) else "its header is incomplete"

    # nothing is wrong where a writer has just begun
    if not journal.sealed and _is_being_begun(journal, headers, len(content)):
        journal.begun = True
        return None
    journal.damages += [
        SegmentDamage("header", f"segments/{path.name}", why, journal.name) for path, why in torn.items()
    ]
    if len(headers) == 2 and headers[0][0] != headers[1][0]:
        what = "its header is not that of its journal"
        journal.damages.append(SegmentDamage("header", f"segments/{next(iter(heads)).name}", what, journal.name))
        return None
    if headers:
        journal.header, journal.first = headers[0]
    return journal.first


def _is_being_begun(journal: JournalScan, headers: list[tuple[dict[str, Any], int]], journal_size: int) -> bool:
    """Tell whether a writer stands, or was killed, before its first payload: it writes one header after the other."""
    if journal.bin is None:
        return False
    first = headers[0][1] if headers else _MOST_HEADER
    try:
        size = journal.bin.stat().st_size
    except FileNotFoundError:  # sealed, or taken away, between two looks
        return False
    return size <= first and (not headers or journal_size < first)


def _head_of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_HEADER)
    except OSError:
        return b""


def _size_by_rows(content: bytes) -> int | None:
    """Find where the rows begin behind a header that is broken."""
    # headers end on a multiple of ALIGN, and a row proves itself by its checksum
    for size in range(0, min(len(content), _MOST_HEADER), ALIGN):
        head = content[size : size + 8 * ROW.itemsize]
        if len(head) >= ROW.itemsize and any(head) and whole_rows(head)[1].any():
            return size
    return None


def _take_rows(journal: JournalScan, content: bytes) -> None:
    """Take the rows that are whole. In an unsealed journal the rest of a row is one that was not committed."""
    rows, right = whole_rows(content)
    journal.rows = rows[right]
    assert journal.idx is not None
    file = f"segments/{journal.idx.name}"
    wrong = np.flatnonzero(~right)
    for position in wrong[:MOST_NAMED]:
        says = f"row {position:,} of the journal has a wrong checksum"
        journal.damages.append(SegmentDamage("journal", file, says, journal.name, entries=1))
    if len(wrong) > MOST_NAMED:
        says = f"{len(wrong) - MOST_NAMED:,} more rows of the journal have wrong checksums"
        journal.damages.append(SegmentDamage("journal", file, says, journal.name, entries=len(wrong) - MOST_NAMED))
    if journal.sealed and (remaining := len(content) % ROW.itemsize):
        journal.damages.append(
            SegmentDamage("journal", file, f"the journal ends in {remaining} bytes of a row", journal.name)
        )


_WINDOW = 8 << 20
_HEAD_OF_PAYLOAD = 1 << 16
_TUPLES = 1 << 14


@dataclass
class SegmentReport:
    """What was found in one segment."""

    name: str
    bytes: int = 0
    entries: int = 0  # that are whole and count
    bad: list[int] = field(default_factory=list)  # offsets of committed entries that are not whole
    rewrite: bool = False  # what is whole must go to other files: these cannot be believed any more
    damages: list[SegmentDamage] = field(default_factory=list)
    unnamed: int = 0  # damaged entries beyond those that are named

    def add(self, damage: SegmentDamage, *, rewrite: bool = False) -> None:
        """Take note of a damage; rewrite: it is of the files rather than of entries."""
        self.rewrite |= rewrite
        if len(self.damages) < MOST_NAMED or rewrite:
            self.damages.append(damage)
        else:
            self.unnamed += 1


def check_segment(segments: Path, name: str, dropped: np.ndarray) -> tuple[SegmentReport, JournalScan]:
    """Read a segment to its end. dropped: sorted offsets of entries that do not count any more."""
    journal = read_journal(segments, name)
    report = SegmentReport(name)
    for damage in journal.damages:
        report.add(damage, rewrite=True)
    counts = ~np.isin(journal.rows["offset"], dropped)
    if journal.bin is None:
        _deleted(journal, report, counts)
        return report, journal
    if journal.idx is None:
        _without_journal(journal, report, segments)
        return report, journal
    try:
        with journal.bin.open("rb", buffering=0) as file:
            _read_through(journal, _Window(file.fileno()), report, counts)
    except FileNotFoundError:  # sealed since its journal was read
        journal.bin = find(segments, name, BIN)
        if journal.bin is None:
            _deleted(journal, report, counts)
        else:
            with journal.bin.open("rb", buffering=0) as file:
                _read_through(journal, _Window(file.fileno()), report, counts)
    return report, journal


def _deleted(journal: JournalScan, report: SegmentReport, counts: np.ndarray) -> None:
    report.bad = [int(offset) for offset in journal.rows["offset"][counts]]
    if not report.bad and not report.damages:
        return  # what is left of a segment that was taken away on purpose
    says = f"is deleted: {len(report.bad):,} entries are lost"
    report.add(
        SegmentDamage("deleted", f"segments/{journal.name}{BIN}", says, journal.name, entries=len(report.bad)),
        rewrite=True,
    )


def _without_journal(journal: JournalScan, report: SegmentReport, segments: Path) -> None:
    if journal.begun or find(segments, journal.name, IDX) or not find(segments, journal.name, BIN):
        return  # a writer makes its two files one after the other, and a clean-up takes them away so
    says = "has no journal: its content is unknown"
    report.add(SegmentDamage("deleted", f"segments/{journal.name}{IDX}", says, journal.name), rewrite=True)


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
            raise OSError(0, "the file ends before it")
        self.stop = start + got


def _read_through(journal: JournalScan, window: _Window, report: SegmentReport, counts: np.ndarray) -> None:
    """Compare every payload that counts with its row, and what lies between with zeros."""
    assert journal.bin is not None
    file = f"segments/{journal.bin.name}"
    order = np.argsort(journal.rows["offset"], kind="stable")
    rows = journal.rows[order]
    # without a header nothing says where the first payload begins, and it is named anyway
    end = journal.first
    whole_journal = not journal.damages
    cut = beyond = 0
    for (address, offset, length, crc, kind, *_), count in zip(row_tuples(rows), counts[order], strict=True):
        stop = offset + length
        if whole_journal and end is not None and end < offset:
            _padding(window, end, min(offset, window.size), file, report)
        end = stop
        beyond += stop > window.size
        report.bytes += length if count else 0
        if not count:
            continue
        if stop > window.size:
            cut += 1
            report.bad.append(offset)
        elif why := _wrong(window, offset, stop, crc):
            report.bad.append(offset)
            record = _record(window, offset, stop, kind)
            word = "checksum" if why.endswith("checksum") else "unreadable"
            report.add(SegmentDamage(word, file, why, journal.name, offset, address.hex(), record, 1))
        else:
            report.entries += 1
    if cut:
        says = f"is truncated to {window.size:,} bytes: {cut:,} entries are lost"
        report.add(SegmentDamage("truncated", file, says, journal.name, window.size, entries=cut))
    if whole_journal and end is not None and not beyond:
        _tail(window, end, journal, report)


def row_tuples(rows: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Yield rows as tuples, of which few are in memory at a time."""
    for start in range(0, len(rows), _TUPLES):
        yield from rows[start : start + _TUPLES].tolist()


def _tail(window: _Window, end: int, journal: JournalScan, report: SegmentReport) -> None:
    """A sealed segment ends with its last entry: what stands behind it has lost its rows."""
    assert journal.idx is not None and journal.bin is not None
    file, aligned = f"segments/{journal.bin.name}", -(-end // ALIGN) * ALIGN
    if window.size < aligned:
        says = f"is truncated to {window.size:,} bytes, in the zeros after its last entry"
        report.add(SegmentDamage("truncated", file, says, journal.name, window.size), rewrite=True)
        return
    _padding(window, end, aligned, file, report)
    if journal.sealed and window.size > aligned:
        says = f"the journal is cut: {window.size - aligned:,} bytes of {journal.bin.name} belong to none of its rows"
        report.add(SegmentDamage("journal", f"segments/{journal.idx.name}", says, journal.name, aligned), rewrite=True)


def _padding(window: _Window, start: int, stop: int, file: str, report: SegmentReport) -> None:
    try:
        zeros = stop <= start or not any(piece.any() for piece in window.pieces(start, stop))
        why = "bytes between two entries are not zeros"
    except OSError as error:
        zeros, why = False, f"cannot be read: {error.strerror}"
    if not zeros:
        report.add(SegmentDamage("padding", file, why, report.name, start), rewrite=True)


def _wrong(window: _Window, start: int, stop: int, crc: int) -> str:
    """Say why a payload is not what was written; nothing where it is."""
    checksum = 0
    try:
        for piece in window.pieces(start, stop):
            checksum = crc32c(piece, checksum)
    except OSError as error:
        return f"an entry cannot be read: {error.strerror}"
    return "" if checksum == crc else "an entry has a wrong checksum"


def _record(window: _Window, start: int, stop: int, kind: int) -> str:
    """Return the name of a record as far as its damaged entry still tells it."""
    with suppress(Exception):  # whatever stands there now
        head = os.pread(window.fd, min(stop - start, _HEAD_OF_PAYLOAD), start)
        if kind == REJECT:
            return rejected(head)[0]
        meta = meta_of(np.frombuffer(head, np.uint8))
        return str(meta.get("name") or meta.get("caption") or "")
    return ""
