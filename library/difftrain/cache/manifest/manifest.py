"""What is wanted of one encoder: the addresses of all entries in the order in which they are made, and who reads them.

A list is written once, into a folder of the index that it belongs to, under a name that all that decides it is hashed
into; any number of processes map it. So a start with unchanged data opens it, and hashes and tokenises nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.cache.manifest.address import BYTES, V16
from difftrain.cache.store.references import REFERENCE_ROW
from difftrain.contracts import CAPTION, PIXELS, Bucket, Encoder, Reject, Source
from difftrain.data.index.column import Column
from difftrain.data.index.index import Index
from difftrain.data.media.media import Unusable
from difftrain.io.files import write_bytes

VERSION = 1  # of the files of a list
ROW = np.dtype([("address", "V16"), ("record", "<u4"), ("variant", "<u2"), ("plain", "u1"), ("spare", "u1")])
FACTS = "facts.json"
NO_RECORD = 0xFFFFFFFF  # record of the empty caption, which all can draw
UNREAD = b"\xff" * BYTES  # in place of the address of what cannot be read now
_NONE = bytes(BYTES)
_CHUNK = 1 << 18
_KEPT = 8  # lists of one name: settings come and go
_STALE_S = 24 * 3600.0
_PART = 1 << 22  # rows whose addresses are sorted at once
_MAX_NAMED = 1000


@dataclass(frozen=True)
class ManifestRequest:
    """One encoder whose features are wanted. batch_size: entries that it takes at once.

    storage: all that decides how its features are stored, as part of their addresses.
    """

    name: str
    encoder: Encoder
    fingerprint: str
    storage: str
    batch_size: int


class CacheManifest:
    """The entries of one encoder, in batches of fixed composition. Picklable; nothing of it is held in memory.

    addresses: (N,) V16, each once; those of one bucket are neighbours, and so are a picture and its mirror image.
    rows: who each entry is first wanted by, (N,) ROW. references: every record and variant, (M,) REFERENCE_ROW, sorted by key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        facts = json.loads((self.folder / FACTS).read_text(encoding="utf-8"))
        self.name: str = facts["name"]
        self.fingerprint: str = facts["fingerprint"]
        self.storage: str = facts["storage"]
        self.inputs: tuple[str, ...] = tuple(facts["inputs"])
        alone = PIXELS if (self.folder / "places.npy").is_file() else CAPTION  # a list of before there were pairs
        self.source: frozenset[Source] = frozenset(facts.get("source", alone))
        self.reference: int = facts.get("reference", 0)
        self.num_references: int = facts.get("references", 1)
        self.batch_size: int = facts["batch_size"]
        self.num_passed: int = facts["num_passed"]
        self.passed = [Reject(*row) for row in facts["passed"]]  # some of what cannot be read now: tried again later
        self._runs = [(Bucket(*bucket), count) for bucket, count in facts["runs"]]
        self._ends = np.cumsum([0, *(count for _, count in self._runs)])
        self._batch_ends = np.cumsum([0, *(-(-count // self.batch_size) for _, count in self._runs)])

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheManifest, (self.folder,)

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
        addresses: np.ndarray = np.load(self.folder / "addresses.npy", mmap_mode="r")
        return addresses

    @cached_property
    def entries(self) -> np.ndarray:
        """Return who each entry is first wanted by. Shape: (N,) ROW."""
        entries: np.ndarray = np.load(self.folder / "entries.npy", mmap_mode="r")
        return entries

    @cached_property
    def references(self) -> np.ndarray:
        """Return every record and variant with its address. Shape: (M,) REFERENCE_ROW."""
        references: np.ndarray = np.load(self.folder / "uses.npy", mmap_mode="r")
        return references

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
        rows = np.zeros(self.count, dtype=bool)
        for start in range(0, self.count, _CHUNK):
            rows[start : start + _CHUNK] = ~has_many(np.array(self.addresses[start : start + _CHUNK]))
        return rows

    def _run(self, batch: int) -> int:
        if not 0 <= batch < self.batches:
            raise IndexError(f"batch {batch}: there are {self.batches}")
        return int(np.searchsorted(self._batch_ends, batch, side="right")) - 1


class AddressByRecord:
    """Where what was made of a record is found: its address by its id. Picklable; runs in loader workers."""

    def __init__(self, folder: Path) -> None:
        """Open. folder: of a CacheManifest of pictures or masks; of pairs, for what their pictures' addresses alone are."""
        self._folder = Path(folder)
        self._column = Column(self._folder / "places.npy")

    def __reduce__(self) -> tuple[Any, ...]:
        return AddressByRecord, (self._folder,)

    def addresses(self, record_ids: Sequence[int], flips: Sequence[bool]) -> list[bytes | None]:
        """Return addresses of records as they are or mirrored; None for one that nothing is made of.

        Raises: Unusable for one that could not be read when it was to be encoded.
        """
        rows = self._column.take(list(record_ids))
        addresses = [rows[i, int(flip)].tobytes() for i, flip in enumerate(flips)]
        if UNREAD in addresses:
            raise Unusable("not cached", "it could not be read when the cache was built; the next start tries again")
        return [None if address == _NONE else address for address in addresses]


@dataclass(frozen=True)
class ManifestFacts:
    """What a list says of itself.

    reference: number of the reference image that is encoded; references: how many are, with their caption. inputs: of a caption's tokens those that decide what is made of it. kind: what tells of all that decides its address.
    """

    name: str
    fingerprint: str
    storage: str
    batch_size: int
    source: frozenset[Source]
    inputs: tuple[str, ...] = ()
    passed: Sequence[Reject] = ()
    kind: str = ""
    reference: int = 0
    references: int = 1


class ManifestWriter:
    """The folder of a manifest, in the index; where nothing can be written there, a temporary one of this process."""

    def __init__(self, index: Index, request: ManifestRequest, settings: Any) -> None:
        state = hashlib.blake2b(digest_size=12)
        parts = [
            VERSION,
            request.name,
            request.fingerprint,
            request.storage,
            request.batch_size,
            request.encoder.inputs,
            settings,
        ]
        state.update(json.dumps(parts, sort_keys=True).encode())
        self._index, self.request = index, request
        self.folder = index.folder / f"wanted-{request.name}-{state.hexdigest()}"

    @property
    def exists(self) -> bool:
        """Tell whether the list is written, and that it is used."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)
        return (self.folder / FACTS).is_file()

    def open_aside(self) -> Path:
        """Return a folder to write the list into."""
        aside = self._index.folder / f"tmp-{uuid.uuid4().hex}"
        for path in self._index.folder.glob("tmp-*"):  # what a kill left behind, a day later
            if path.stat().st_mtime < time.time() - _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
        try:
            aside.mkdir()
        except OSError:  # a cache that can only be read
            aside = Path(tempfile.mkdtemp(prefix="difftrain-wanted-"))
            atexit.register(shutil.rmtree, aside, ignore_errors=True)
        return aside

    def publish(self, aside: Path) -> None:
        """Give the list its name, for all that start later."""
        if aside.parent != self._index.folder:
            self.folder = aside
            return
        try:
            aside.rename(self.folder)
        except OSError:  # another process was faster, with the same list
            shutil.rmtree(aside, ignore_errors=True)
        older = sorted(self._index.folder.glob(f"wanted-{self.request.name}-*"), key=lambda path: path.stat().st_mtime)
        for path in older[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def facts(self, batch_size: int, passed: Sequence[Reject] = (), kind: str = "") -> ManifestFacts:
        """Return what the list says of itself."""
        request, encoder = self.request, self.request.encoder
        return ManifestFacts(
            request.name,
            request.fingerprint,
            request.storage,
            batch_size,
            encoder.source,
            encoder.inputs,
            passed,
            kind,
            encoder.reference,
            encoder.references,
        )


def write_manifest(
    folder: Path,
    facts: ManifestFacts,
    rows: np.ndarray,
    bucket_of: Callable[[np.ndarray], np.ndarray],
    buckets: Sequence[Bucket],
    references: Iterable[np.ndarray],
    num_references: int,
    record_addresses: np.ndarray | None = None,
) -> None:
    """Write a manifest. A folder without facts.json is none, so that is written last.

    rows: what is wanted, in production order, an address perhaps several times. bucket_of: records -> places among
    `buckets`. references: pieces of their rows. Shapes: rows (M,) ROW, may be mapped; record_addresses (N, variants, 16) uint8.
    """
    # entries: of equal addresses the first one
    first = first_occurrences(rows["address"])
    count = int(first.sum())
    addresses = _created(folder / "addresses.npy", V16, count)
    entries = _created(folder / "entries.npy", ROW, count)
    per_bucket, at = np.zeros(len(buckets), dtype=np.int64), 0
    for start in range(0, len(rows), _CHUNK):
        some = np.array(rows[start : start + _CHUNK])[first[start : start + _CHUNK]]
        addresses[at : at + len(some)], entries[at : at + len(some)] = some["address"], some
        per_bucket += np.bincount(bucket_of(some["record"]), minlength=len(buckets))
        at += len(some)

    # references: every record and variant; for pictures also the address by record
    kept, at = _created(folder / "uses.npy", REFERENCE_ROW, num_references), 0
    for piece in references:
        kept[at : at + len(piece)] = piece
        at += len(piece)
    if record_addresses is not None:
        np.save(folder / "places.npy", record_addresses)

    # the facts, last
    facts_json = {
        "version": VERSION,
        "kind": facts.kind,
        "name": facts.name,
        "fingerprint": facts.fingerprint,
        "storage": facts.storage,
        "batch_size": facts.batch_size,
        "source": sorted(facts.source),
        "reference": facts.reference,
        "references": facts.references,
        "inputs": list(facts.inputs),
        "runs": [[list(bucket), int(n)] for bucket, n in zip(buckets, per_bucket, strict=True) if n],
        "num_passed": len(facts.passed),
        "passed": [[reject.path, reject.reason] for reject in facts.passed[:_MAX_NAMED]],
    }
    write_bytes(folder / FACTS, json.dumps(facts_json).encode())


def reference_rows(keys: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the reference rows of what is wanted. Shapes: keys (N, 16), rows (M,) ROW -> pieces of REFERENCE_ROW."""
    for start in range(0, len(rows), _CHUNK):
        some = np.array(rows[start : start + _CHUNK])
        made = np.zeros(len(some), dtype=REFERENCE_ROW)
        own = some["record"] != NO_RECORD
        made["key"][own] = keys[some["record"][own]].view(V16).reshape(-1)
        made["variant"], made["address"] = some["variant"], some["address"]
        yield made


def first_occurrences(addresses: np.ndarray) -> np.ndarray:
    """Tell where each address comes first. A part of all addresses is sorted at a time. Shapes: (N,) V16 -> (N,) bool."""
    count = len(addresses)
    first, parts = np.zeros(count, dtype=bool), -(-count // _PART)
    for part in range(parts):
        positions, words = [], []
        for start in range(0, count, _CHUNK):
            some = np.ascontiguousarray(addresses[start : start + _CHUNK]).view("<u8").reshape(-1, 2)
            own = np.flatnonzero((some[:, 0] & np.uint64(0xFFFFFFFF)) * np.uint64(parts) >> np.uint64(32) == part)
            positions.append(own + start)
            words.append(some[own])
        position, word = np.concatenate(positions), np.concatenate(words)
        order = np.lexsort((word[:, 1], word[:, 0]))  # stable: of equal ones the first comes first
        word = word[order]
        fresh = np.ones(len(word), dtype=bool)
        fresh[1:] = (word[1:] != word[:-1]).any(axis=1)
        first[position[order[fresh]]] = True
    return first


def _created(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    """Make a file of an array, mapped where there is anything in it."""
    if not count:
        empty = np.empty(0, dtype=dtype)
        np.save(path, empty)
        return empty
    made: np.ndarray = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(count,))
    return made
