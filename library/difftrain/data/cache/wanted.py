"""What is wanted of one encoder: the addresses of all entries in the order in which they are made, and who reads them.

A list is written once, into a folder of the index that it belongs to, under a name that all that decides it is hashed
into; any number of processes map it. So a start with unchanged data opens it, and hashes and tokenises nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.contracts import Bucket, Reject
from difftrain.data.cache.address import BYTES, V16
from difftrain.data.cache.uses import USE_ROW
from difftrain.data.columns import Column
from difftrain.data.media import Unusable

VERSION = 1  # of the files of a list
ROW = np.dtype([("address", "V16"), ("record", "<u4"), ("variant", "<u2"), ("plain", "u1"), ("spare", "u1")])
FACTS = "facts.json"
NOBODY = 0xFFFFFFFF  # record of the empty caption, which all can draw
LOST = b"\xff" * BYTES  # in place of the address of what cannot be read now
_NONE = bytes(BYTES)
_CHUNK = 1 << 18
_PART = 1 << 22  # rows whose addresses are sorted at once
_TOLD = 1000


class Wanted:
    """The entries of one encoder, in batches of fixed composition. Picklable; nothing of it is held in memory.

    addresses: (N,) V16, each once; those of one bucket are neighbours, and so are a picture and its mirror image.
    rows: who each entry is first wanted by, (N,) ROW. uses: every record and variant, (M,) USE_ROW, sorted by key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        facts = json.loads((self.folder / FACTS).read_text(encoding="utf-8"))
        self.name: str = facts["name"]
        self.fingerprint: str = facts["fingerprint"]
        self.storage: str = facts["storage"]
        self.inputs: tuple[str, ...] = tuple(facts["inputs"])
        self.batch_size: int = facts["batch_size"]
        self.num_passed: int = facts["num_passed"]
        self.passed = [Reject(*each) for each in facts["passed"]]  # some of what cannot be read now: tried again later
        self._runs = [(Bucket(*bucket), count) for bucket, count in facts["runs"]]
        self._ends = np.cumsum([0, *(count for _, count in self._runs)])
        self._batch_ends = np.cumsum([0, *(-(-count // self.batch_size) for _, count in self._runs)])

    def __reduce__(self) -> tuple[Any, ...]:
        return Wanted, (self.folder,)

    @property
    def count(self) -> int:
        """Return the number of entries."""
        return int(self._ends[-1])

    @property
    def batches(self) -> int:
        """Return the number of batches."""
        return int(self._batch_ends[-1])

    @cached_property
    def addresses(self) -> np.ndarray:
        """Return the address of every entry."""
        found: np.ndarray = np.load(self.folder / "addresses.npy", mmap_mode="r")
        return found

    @cached_property
    def entries(self) -> np.ndarray:
        """Return who each entry is first wanted by. Shape: (N,) ROW."""
        found: np.ndarray = np.load(self.folder / "entries.npy", mmap_mode="r")
        return found

    @cached_property
    def uses(self) -> np.ndarray:
        """Return every record and variant with its address. Shape: (M,) USE_ROW."""
        found: np.ndarray = np.load(self.folder / "uses.npy", mmap_mode="r")
        return found

    @cached_property
    def _columns(self) -> tuple[Column, Column]:
        return Column(self.folder / "entries.npy"), Column(self.folder / "addresses.npy")

    def take(self, rows: Sequence[int]) -> tuple[np.ndarray, list[bytes]]:
        """Read some entries and their addresses without mapping the files: workers stay small. Shape: (n,) ROW."""
        entries, addresses = (column.take(list(rows)) for column in self._columns)
        return entries, [address.tobytes() for address in addresses]

    def buckets(self) -> list[tuple[Bucket, int]]:
        """Return each bucket and its number of entries."""
        return self._runs

    def bucket(self, batch: int) -> Bucket:
        """Return the bucket of a batch."""
        return self._runs[self._run(batch)][0]

    def rows(self, batch: int) -> range:
        """Return the entries of a batch."""
        run = self._run(batch)
        start = int(self._ends[run]) + (batch - int(self._batch_ends[run])) * self.batch_size
        return range(start, min(start + self.batch_size, int(self._ends[run + 1])))

    def batch_of(self, row: int) -> int:
        """Return the batch of an entry."""
        run = int(np.searchsorted(self._ends, row, side="right")) - 1
        return int(self._batch_ends[run]) + (row - int(self._ends[run])) // self.batch_size

    def missing(self, has_many: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Tell of every entry whether it is not there. has_many: addresses -> whether each is. Shape: (N,) bool."""
        found = np.zeros(self.count, dtype=bool)
        for start in range(0, self.count, _CHUNK):
            found[start : start + _CHUNK] = ~has_many(np.array(self.addresses[start : start + _CHUNK]))
        return found

    def _run(self, batch: int) -> int:
        if not 0 <= batch < self.batches:
            raise IndexError(f"batch {batch}: there are {self.batches}")
        return int(np.searchsorted(self._batch_ends, batch, side="right")) - 1


class Places:
    """Where what was made of a record is found: its address by its id. Picklable; runs in loader workers."""

    def __init__(self, folder: Path) -> None:
        """Open. folder: of a Wanted of pictures or masks."""
        self._folder = Path(folder)
        self._column = Column(self._folder / "places.npy")

    def __reduce__(self) -> tuple[Any, ...]:
        return Places, (self._folder,)

    def addresses(self, record_ids: Sequence[int], flips: Sequence[bool]) -> list[bytes | None]:
        """Return addresses of records as they are or mirrored; None for one that nothing is made of.

        Raises: Unusable for one that could not be read when it was to be encoded.
        """
        rows = self._column.take(list(record_ids))
        found = [rows[i, int(flip)].tobytes() for i, flip in enumerate(flips)]
        if LOST in found:
            raise Unusable("not cached", "it could not be read when the cache was built; the next start tries again")
        return [None if address == _NONE else address for address in found]


@dataclass(frozen=True)
class Facts:
    """What a list says of itself.

    inputs: of a caption's tokens those that decide what is made of it. kind: what tells of all that decides its address.
    """

    name: str
    fingerprint: str
    storage: str
    batch_size: int
    inputs: tuple[str, ...] = ()
    passed: Sequence[Reject] = ()
    kind: str = ""


def write(
    folder: Path,
    facts: Facts,
    rows: np.ndarray,
    bucket_of: Callable[[np.ndarray], np.ndarray],
    buckets: Sequence[Bucket],
    uses: Iterable[np.ndarray],
    num_uses: int,
    places: np.ndarray | None = None,
) -> None:
    """Write a list. A folder without facts.json is none, so that is written last.

    rows: what is wanted, in production order, an address perhaps several times. bucket_of: records -> places among
    `buckets`. uses: pieces of the use rows. Shapes: rows (M,) ROW, may be mapped; places (N, variants, 16) uint8.
    """
    first = first_of_each(rows["address"])
    count = int(first.sum())
    addresses = _created(folder / "addresses.npy", V16, count)
    entries = _created(folder / "entries.npy", ROW, count)
    per_bucket, at = np.zeros(len(buckets), dtype=np.int64), 0
    for start in range(0, len(rows), _CHUNK):
        some = np.array(rows[start : start + _CHUNK])[first[start : start + _CHUNK]]
        addresses[at : at + len(some)], entries[at : at + len(some)] = some["address"], some
        per_bucket += np.bincount(bucket_of(some["record"]), minlength=len(buckets))
        at += len(some)
    kept, at = _created(folder / "uses.npy", USE_ROW, num_uses), 0
    for piece in uses:
        kept[at : at + len(piece)] = piece
        at += len(piece)
    if places is not None:
        np.save(folder / "places.npy", places)
    said = {
        "version": VERSION,
        "kind": facts.kind,
        "name": facts.name,
        "fingerprint": facts.fingerprint,
        "storage": facts.storage,
        "batch_size": facts.batch_size,
        "inputs": list(facts.inputs),
        "runs": [[list(bucket), int(n)] for bucket, n in zip(buckets, per_bucket, strict=True) if n],
        "num_passed": len(facts.passed),
        "passed": [[each.path, each.reason] for each in facts.passed[:_TOLD]],
    }
    aside = folder / f"{uuid.uuid4().hex}.tmp"
    aside.write_text(json.dumps(said), encoding="utf-8")
    aside.rename(folder / FACTS)


def use_rows(keys: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the use rows of what is wanted. Shapes: keys (N, 16), rows (M,) ROW -> pieces of USE_ROW."""
    for start in range(0, len(rows), _CHUNK):
        some = np.array(rows[start : start + _CHUNK])
        made = np.zeros(len(some), dtype=USE_ROW)
        own = some["record"] != NOBODY
        made["key"][own] = keys[some["record"][own]].view(V16).reshape(-1)
        made["variant"], made["address"] = some["variant"], some["address"]
        yield made


def first_of_each(addresses: np.ndarray) -> np.ndarray:
    """Tell where each address comes first. A part of all addresses is sorted at a time. Shapes: (N,) V16 -> (N,) bool."""
    count = len(addresses)
    first, parts = np.zeros(count, dtype=bool), -(-count // _PART)
    for part in range(parts):
        places, words = [], []
        for start in range(0, count, _CHUNK):
            some = np.ascontiguousarray(addresses[start : start + _CHUNK]).view("<u8").reshape(-1, 2)
            own = np.flatnonzero((some[:, 0] & np.uint64(0xFFFFFFFF)) * np.uint64(parts) >> np.uint64(32) == part)
            places.append(own + start)
            words.append(some[own])
        place, word = np.concatenate(places), np.concatenate(words)
        order = np.lexsort((word[:, 1], word[:, 0]))  # stable: of equal ones the first comes first
        word = word[order]
        fresh = np.ones(len(word), dtype=bool)
        fresh[1:] = (word[1:] != word[:-1]).any(axis=1)
        first[place[order[fresh]]] = True
    return first


def _created(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    """Make a file of an array, mapped where there is anything in it."""
    if not count:
        empty = np.empty(0, dtype=dtype)
        np.save(path, empty)
        return empty
    made: np.ndarray = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(count,))
    return made
