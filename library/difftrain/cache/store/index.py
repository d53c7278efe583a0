"""Finding entries: one look into metadata.db each. Picklable; every process opens the file for itself."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from difftrain.cache.store import journals
from difftrain.cache.store.compaction import MergeResult, merge
from difftrain.cache.store.format import ADDRESS, REJECT, Damaged
from difftrain.cache.store.journals import order_of
from difftrain.contracts import DataFault

__all__ = ["EntryRow", "MergeResult", "Metadata", "SegmentInfo", "merge"]

_ROW = "SELECT number, segment, offset, length, crc, kind FROM entries WHERE address = ?"
_ASKED = 1000  # addresses of one query
_SCAN = 8  # where more than one of so many entries is asked for, all of them are read in order
_FETCHED = 1 << 16
_SETTINGS = "PRAGMA query_only = ON; PRAGMA cache_size = -8192; PRAGMA mmap_size = 0;"


class EntryRow(NamedTuple):
    """Where an entry lies."""

    number: int  # 0 to count - 1, each once
    segment: str
    offset: int
    length: int
    crc: int
    kind: int


@dataclass(frozen=True)
class SegmentInfo:
    """What counts of a segment."""

    name: str
    header: dict[str, Any]
    entries: int
    bytes: int
    end: int  # of the payload that ends last, whether it counts or not


class Metadata:
    """The entries of a cache as the last merge left them. A later merge changes nothing for who has opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = 0
        self._connection: sqlite3.Connection | None = None
        self._execute: Any = None
        self._names: dict[int, str] = {}

    def lookup(self, address: bytes) -> EntryRow | None:
        """Return where an entry lies, or None. Raises DataFault."""
        if self._process != os.getpid():
            with self._reading():
                pass
        try:  # not in a context manager: this is done for every entry that is read, and takes a third of the time without
            row = self._execute(_ROW, (address,)).fetchone()
            if row is None:
                return None
            number, segment, offset, length, crc, kind = row
            return EntryRow(number, self._names[segment], offset, length, crc, kind)
        except sqlite3.Error as error:
            raise self._fault(error) from None

    def rows(self, addresses: np.ndarray) -> Iterator[EntryRow | None]:
        """Yield where each of many entries lies. Shapes: addresses (N,) V16, or (N, 16) uint8. Raises DataFault."""
        for address in _split(addresses):
            yield self.lookup(address)

    def has_many(self, addresses: np.ndarray) -> np.ndarray:
        """Tell which entries are there. Shapes: addresses (N,) V16 or (N, 16) uint8, result (N,) bool. Raises DataFault."""
        words = np.ascontiguousarray(addresses).view(np.uint8).reshape(-1, 16).view(">u8").astype(np.uint64)
        # sorted, so that the database is walked along its own order
        order = order_of(words[:, 0], words[:, 1])
        ordered = words[order]
        present = self._scan(ordered) if len(ordered) * _SCAN > self.count else self._ask(ordered)
        result = np.empty(len(ordered), bool)
        result[order] = present
        return result

    def _ask(self, ordered: np.ndarray) -> np.ndarray:
        """Tell which of sorted addresses are there, by one look each."""
        requested = _split(ordered.astype(">u8"))
        present = np.zeros(len(requested), bool)
        with self._reading() as db:
            for start in range(0, len(requested), _ASKED):
                some = requested[start : start + _ASKED]
                marks = ",".join("?" * len(some))
                addresses = {
                    row[0] for row in db.execute(f"SELECT address FROM entries WHERE address IN ({marks})", some)
                }
                present[start : start + len(some)] = [address in addresses for address in some]
        return present

    def _scan(self, ordered: np.ndarray) -> np.ndarray:
        """Tell which of sorted addresses are there, by reading all entries between the first and the last of them."""
        present = np.zeros(len(ordered), bool)
        if not len(ordered):
            return present
        ends = _split(ordered[[0, -1]].astype(">u8"))
        start = 0
        with self._reading() as db:
            cursor = db.execute("SELECT address FROM entries WHERE address BETWEEN ? AND ? ORDER BY address", ends)
            while rows := cursor.fetchmany(_FETCHED):
                some = np.frombuffer(b"".join(row[0] for row in rows), ">u8").astype(np.uint64).reshape(-1, 2)
                last = some[-1]
                # merge of two sorted lists, a fetched piece at a time
                stop = start + int(np.searchsorted(ordered[start:, 0], last[0], side="right"))
                present[start:stop] |= _in_sorted(ordered[start:stop], some)
                start += int(np.searchsorted(ordered[start:stop, 0], last[0], side="left"))  # the rest of an equal half
        return present

    def rejects(self) -> list[bytes]:
        """Return the addresses of all entries that say why nothing could be made of something. Raises DataFault."""
        if not self._facts["rejects"]:
            return []
        with self._reading() as db:
            return [address for (address,) in db.execute(f"SELECT address FROM entries WHERE kind = {REJECT}")]

    def query(self, words: str, *values: Any) -> sqlite3.Cursor:
        """Ask the database itself; all answers of one object are of one state of the cache. Raises DataFault."""
        with self._reading() as db:
            return db.execute(words, values)

    def segments(self) -> list[SegmentInfo]:
        """Return all segments by name. Raises DataFault."""
        with self._reading() as db:
            rows = db.execute("SELECT name, header, entries, bytes, end FROM segments ORDER BY name").fetchall()
        return [SegmentInfo(name, json.loads(header), *numbers) for name, header, *numbers in rows]

    @cached_property
    def count(self) -> int:
        """Return how many entries count. Raises DataFault."""
        return int(self._facts["numbers"])

    @property
    def generation(self) -> str:
        """Return what differs between any two databases. Raises DataFault."""
        return str(self._facts["generation"])

    @cached_property
    def _facts(self) -> dict[str, Any]:
        with self._reading() as db:
            return journals.meta(db)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Give the connection of this process. Raises DataFault."""
        try:
            if (
                self._connection is None or self._process != os.getpid()
            ):  # one that was opened before a fork is not used
                self._connection = journals.connect(self.path)
                self._process = os.getpid()
                self._connection.executescript(_SETTINGS)
                self._names = dict(self._connection.execute("SELECT id, name FROM segments"))
                self._execute = self._connection.execute
            yield self._connection
        except FileNotFoundError:
            raise DataFault(f"{self.path} is not there: no feature cache was built in this folder") from None
        except (OSError, Damaged, sqlite3.Error) as error:
            raise self._fault(error) from None

    def _fault(self, error: Exception) -> DataFault:
        return DataFault(
            f"{self.path}, the index of the feature cache, cannot be read: {error}. The next build restores it from the segments"
            "stored when the cache is built the next time"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _split(addresses: np.ndarray) -> list[bytes]:
    content = np.ascontiguousarray(addresses).tobytes()
    return [content[start : start + ADDRESS.itemsize] for start in range(0, len(content), ADDRESS.itemsize)]


def _in_sorted(requested: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Tell which of sorted addresses are in other sorted ones. Shapes: (N, 2) and (M, 2) uint64, result (N,)."""
    places = np.minimum(np.searchsorted(present[:, 0], requested[:, 0]), len(present) - 1)
    matches: np.ndarray = (present[places] == requested).all(axis=1)
    for number in np.flatnonzero(
        ~matches & (present[places, 0] == requested[:, 0])
    ).tolist():  # equal in their first half
        same = present[present[:, 0] == requested[number, 0]]
        matches[number] = bool((same == requested[number]).all(axis=1).any())
    return matches
