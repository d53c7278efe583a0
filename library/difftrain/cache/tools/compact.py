"""What a clean-up and a repair have in common: which entries any configuration wants, and copying these into new segments."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from difftrain.cache.store import references
from difftrain.cache.store.folder import BIN, IDX, PART, CacheFolder, disk_faults
from difftrain.cache.store.format import ADDRESS, PackedEntry, crc32c
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.store.references import Reference
from difftrain.cache.store.segment import SEGMENT_BYTES, SegmentWriter
from difftrain.cache.tools.segment_check import JournalScan, find
from difftrain.contracts import DataFault, TrainingFault
from difftrain.io.files import fsync_folder
from difftrain.io.process import is_gone

_COMMIT = 64 << 20  # bytes of one append
_SILENT_S = 24 * 3600.0
_OWN = ("format", "segment", "writer")  # facts of a header that are of one segment


class EntryMover:
    """Append entries of old segments to new ones; segments of one encoder go into the same."""

    def __init__(self, folder: CacheFolder) -> None:
        self.folder = folder
        self.bytes = 0
        self._writers: dict[str, SegmentWriter] = {}

    def take(self, name: str, header: Mapping[str, Any], rows: np.ndarray) -> np.ndarray:
        """Copy entries of a segment; return which of them were still whole. Raises OSError, TrainingFault."""
        facts = {key: value for key, value in header.items() if key not in _OWN}
        which = json.dumps(facts, sort_keys=True)
        writer = self._writers.setdefault(which, SegmentWriter(self.folder, facts, segment_bytes=SEGMENT_BYTES))
        complete = np.zeros(len(rows), bool)
        waiting: list[PackedEntry] = []
        size = 0
        for number, payload in payloads(self.folder, name, rows):
            waiting.append(PackedEntry(bytes(rows["address"][number]), [payload], int(rows["kind"][number])))
            complete[number], size = True, size + len(payload)
            if size >= _COMMIT:
                writer.append(waiting)
                self.bytes, waiting, size = self.bytes + size, [], 0
        writer.append(waiting)
        self.bytes += size
        return complete

    def close(self) -> None:
        """Seal what was written. Raises TrainingFault."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


def payloads(folder: CacheFolder, name: str, rows: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yield the payloads of a segment that are whole, with the number of their row."""
    try:
        file = folder.open_file(name, BIN)
    except FileNotFoundError:
        return
    with file:
        for number, row in enumerate(rows):
            with suppress(OSError):  # a place of the disk that cannot be read
                payload = os.pread(file.fileno(), int(row["length"]), int(row["offset"]))
                if len(payload) == row["length"] and crc32c(payload) == row["crc"]:
                    yield number, payload


def why_still_open(folder: CacheFolder, journal: JournalScan, header: Mapping[str, Any]) -> str:
    """Say why a segment may still be written to; nothing where it is sealed, or its writer has ended.

    A writer of another machine counts as ended when its journal has not changed for a day, by the clock of the file
    system alone: that of a file which is made there now. header: the segment's, wherever it is still known from.
    """
    path = journal.idx or journal.bin
    if journal.sealed or path is None or path.suffix != PART:
        return ""
    gone = is_gone(str(header.get("writer", "")))
    if gone is None:
        try:
            with tempfile.TemporaryFile(dir=folder.segments) as probe:
                gone = os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime > _SILENT_S
        except OSError as error:
            return f"cannot tell whether a build is writing it: {error.strerror}"
        return "" if gone else "a build on another machine may be writing it"
    return "" if gone else "a build is writing it"


def delete_segment(folder: CacheFolder, name: str) -> int:
    """Delete both files of a segment; return how many bytes are free by that. Raises TrainingFault.

    The payloads go first: a journal without them, all of whose rows are dropped, is no damage.
    """
    freed = 0
    with disk_faults(folder.path):
        for suffix in (BIN, IDX):
            while (path := find(folder.segments, name, suffix)) is not None:
                with suppress(FileNotFoundError):  # another tool was faster
                    size = path.stat().st_size
                    path.unlink()
                    freed += size
            fsync_folder(folder.segments)
    return freed


T = TypeVar("T")
_TRIES = 20
_CHUNK = 1 << 18
_ASKED = 1000  # addresses of one query


def retry_while_changing(folder: CacheFolder, read: Callable[[list[Reference]], T]) -> T:
    """Read something of all uses, again where one is being replaced or forgotten just then. Raises DataFault."""
    for _ in range(_TRIES - 1):
        try:
            return read(references.all_references(folder))
        except DataFault:
            time.sleep(0.02)
    return read(references.all_references(folder))


def referenced_numbers(folder: CacheFolder, known: Metadata, without: Collection[str] = ()) -> np.ndarray:
    """Return which entries uses want, a bit each by their numbers. without: ids that do not count. Raises DataFault."""

    def read(every: list[Reference]) -> np.ndarray:
        bits = np.zeros(known.count // 8 + 1, np.uint8)
        for addresses in _addresses(use for use in every if use.id not in without):
            numbers = np.array(_numbers(known, addresses), np.int64)
            np.bitwise_or.at(bits, numbers >> 3, (1 << (numbers & 7)).astype(np.uint8))
        return bits

    return retry_while_changing(folder, read)


def _addresses(every: Iterator[Reference]) -> Iterator[np.ndarray]:
    for use in every:
        for encoder in use.encoders:
            rows = use.rows(encoder)
            for start in range(0, len(rows), _CHUNK):
                yield np.ascontiguousarray(rows["address"][start : start + _CHUNK])


def _numbers(known: Metadata, addresses: np.ndarray) -> list[int]:
    """Return the numbers of the entries at some addresses."""
    requested = np.unique(addresses.view(f"S{ADDRESS.itemsize}")).view(ADDRESS).tolist()
    numbers: list[int] = []
    for start in range(0, len(requested), _ASKED):
        some = requested[start : start + _ASKED]
        marks = ",".join("?" * len(some))
        numbers += [
            number for (number,) in known.query(f"SELECT number FROM entries WHERE address IN ({marks})", *some)
        ]
    return numbers


def count_still_referenced(folder: CacheFolder, going: Mapping[str, np.ndarray]) -> int:
    """Count the whole entries in rows of segments, all of them dropped by now, that are wanted and nowhere else.

    Raises: DataFault, TrainingFault.
    """
    if not going:
        return 0
    known = _with_all_drops(folder)
    starts = np.unique(np.concatenate([_start(rows["address"]) for rows in going.values()]))

    def read(every: list[Reference]) -> list[np.ndarray]:
        lost = []
        for addresses in _addresses(iter(every)):
            among = addresses[np.isin(_start(addresses), starts)]  # perhaps others that begin alike: no harm
            if len(among):
                lost.append(_start(among[~known.has_many(among)]))
        return lost

    lost = np.unique(np.concatenate([np.empty(0, np.uint64), *retry_while_changing(folder, read)]))
    if not len(lost):
        return 0
    count = 0
    for name, rows in going.items():
        # what a repair has dropped is wanted too, but no loss
        count += sum(1 for _ in payloads(folder, name, rows[np.isin(_start(rows["address"]), lost)]))
    return count


def _with_all_drops(folder: CacheFolder) -> Metadata:
    """Return the index as it is with all drops of now, also where others change it at the same time."""
    for _ in range(_TRIES):
        merge(folder)
        known = Metadata(folder.database)
        ((state,),) = known.query("SELECT value FROM meta WHERE name = 'drops'")
        if state == references.state(folder):
            return known
        time.sleep(random.random() / 10)
    raise TrainingFault(f"{folder.path}: other processes keep changing it; nothing was lost. Run this again later")


def _start(addresses: np.ndarray) -> np.ndarray:
    """Return the first half of each address."""
    return np.ascontiguousarray(addresses).view(np.uint64).reshape(-1, 2)[:, 0]
