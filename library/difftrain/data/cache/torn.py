"""What the files of one segment say, as far as they can be believed: its headers and the rows of its journal.

Faults are found, not raised, and each is named. A file that a build is just beginning, or was killed while it began, is none.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.data.cache.folder import BIN, IDX, PART
from difftrain.data.cache.format import ALIGN, ROW, Damaged, header_block, read_header, whole_rows

MOST_NAMED = 100  # damaged entries of a segment that are named one by one; all are counted
_MOST_HEADER = 1 << 20


@dataclass(frozen=True)
class Damage:
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
        place = f" at offset {self.offset:,}" if self.offset is not None else ""
        address = f", address {self.address}" if self.address else ""
        record = f", of {self.record!r}" if self.record else ""
        return f"{self.file}{place}: {self.says}{address}{record}"

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


@dataclass
class Journal:
    """What a journal says, as far as it can be believed."""

    name: str
    idx: Path | None
    bin: Path | None
    header: dict[str, Any] | None = None
    first: int | None = None  # where the first payload and the first row begin: the size of the header
    sealed: bool = False
    begun: bool = False  # nothing was committed yet
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, ROW))  # those whose checksum is right
    damages: list[Damage] = field(default_factory=list)


def find(segments: Path, name: str, suffix: str) -> Path | None:
    """Return a file of a segment, sealed or not; None where there is none."""
    paths = (segments / f"{name}{suffix}", segments / f"{name}{suffix}{PART}", segments / f"{name}{suffix}")
    return next((path for path in paths if path.is_file()), None)  # thrice: it may be sealed meanwhile


def read_journal(segments: Path, name: str) -> Journal:
    """Read what can be read of a journal. Faults are found, not raised."""
    for pause_s in (0.05, 0.15, 0.0):
        journal = _read_journal(segments, name)
        if journal.sealed or not journal.damages:
            break
        time.sleep(pause_s)  # a build may just be writing it
    return journal


def _read_journal(segments: Path, name: str) -> Journal:
    journal, content = Journal(name, find(segments, name, IDX), None), b""
    if journal.idx is not None:
        try:
            content = journal.idx.read_bytes()
        except FileNotFoundError:  # sealed between two looks, or gone
            journal.idx = find(segments, name, IDX)
            content = journal.idx.read_bytes() if journal.idx else b""
        except OSError as error:  # a disk that cannot read it any more
            journal.damages.append(Damage("unreadable", f"segments/{journal.idx.name}", str(error.strerror), name))
    journal.sealed = journal.idx is not None and journal.idx.suffix == IDX
    journal.bin = find(segments, name, BIN)
    size = _take_headers(journal, content)
    if journal.idx is not None and size is None and not journal.begun:
        size = _size_by_rows(content)
    if journal.idx is not None and size is not None:
        _take_rows(journal, content[size:])
    return journal


def _take_headers(journal: Journal, content: bytes) -> int | None:
    """Judge both headers; return the size of that which is whole."""
    heads = {}
    if journal.bin is not None:
        heads[journal.bin] = _head_of_file(journal.bin)
    if journal.idx is not None:
        heads[journal.idx] = content[:_MOST_HEADER]
    whole: list[tuple[dict[str, Any], int]] = []
    torn = {}
    for path, head in heads.items():
        try:
            facts, size = read_header(head)
            if head[:size] != header_block(facts):
                raise Damaged("its header is torn")
            whole.append((facts, size))
        except (Damaged, ValueError, TypeError) as error:
            torn[path] = str(error) if isinstance(error, Damaged) else "its header is torn"
    if not journal.sealed and _is_being_begun(journal, whole, len(content)):
        journal.begun = True
        return None
    journal.damages += [Damage("header", f"segments/{path.name}", why, journal.name) for path, why in torn.items()]
    if len(whole) == 2 and whole[0][0] != whole[1][0]:
        what = "its header is not that of its journal"
        journal.damages.append(Damage("header", f"segments/{next(iter(heads)).name}", what, journal.name))
        return None
    if whole:
        journal.header, journal.first = whole[0]
    return journal.first


def _is_being_begun(journal: Journal, whole: list[tuple[dict[str, Any], int]], journal_size: int) -> bool:
    """Tell whether a writer stands, or was killed, before its first payload: it writes one header after the other."""
    if journal.bin is None:
        return False
    first = whole[0][1] if whole else _MOST_HEADER
    try:
        size = journal.bin.stat().st_size
    except FileNotFoundError:  # sealed, or taken away, between two looks
        return False
    return size <= first and (not whole or journal_size < first)


def _head_of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_HEADER)
    except OSError:
        return b""


def _size_by_rows(content: bytes) -> int | None:
    """Find where the rows begin behind a header that is broken."""
    for size in range(0, min(len(content), _MOST_HEADER), ALIGN):
        head = content[size : size + 8 * ROW.itemsize]
        if len(head) >= ROW.itemsize and any(head) and whole_rows(head)[1].any():
            return size
    return None


def _take_rows(journal: Journal, content: bytes) -> None:
    """Take the rows that are whole. In an unsealed journal the rest of a row is one that was not committed."""
    rows, right = whole_rows(content)
    journal.rows = rows[right]
    assert journal.idx is not None
    file = f"segments/{journal.idx.name}"
    wrong = np.flatnonzero(~right)
    for place in wrong[:MOST_NAMED]:
        says = f"row {place:,} of the journal has a wrong checksum"
        journal.damages.append(Damage("journal", file, says, journal.name, entries=1))
    if len(wrong) > MOST_NAMED:
        says = f"{len(wrong) - MOST_NAMED:,} more rows of the journal have wrong checksums"
        journal.damages.append(Damage("journal", file, says, journal.name, entries=len(wrong) - MOST_NAMED))
    if journal.sealed and (rest := len(content) % ROW.itemsize):
        journal.damages.append(Damage("journal", file, f"the journal ends in {rest} bytes of a row", journal.name))
