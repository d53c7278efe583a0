"""Columnar tables for planning: the ids of each bucket's records, in an order that only keys and settings decide.

One file of uint32 ids beside a JSON header, memory-mapped: SQLite would scan 0.6 s a million. table_build.py writes
them; every rank and worker reads them in constant memory.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from difftrain.contracts import Bucket, DataFault

VERSION = 1
SEGMENT = np.dtype([("shard", "<i8"), ("first", "<i8"), ("records", "<i8"), ("repeats", "<i8")])
_RELEASE_ROWS = 256  # a touched entry maps up to 64 KiB around itself: at most 16 MiB a file between two releases

Layout = Literal["key", "shard"]  # rows of a bucket by (repeats, key), or by (shard, key) to read tars in sequence


@dataclass(frozen=True)
class BucketRows:
    """The rows of one bucket. A segment is a run of them with one number of repeats (and one shard)."""

    bucket: Bucket
    first: int
    records: int
    uses: int  # records with repeats counted
    digest: str  # of keys, repeats and their order
    segments: np.ndarray  # SEGMENT, memory-mapped


class Indexed(Protocol):
    """What the tables need of an index; picklable."""

    def columns(self) -> Any: ...


class Tables:
    """Read tables: what each bucket holds, and the id and key of any row. Picklable."""

    def __init__(self, folder: Path, index: Indexed) -> None:
        self.folder, self._index = Path(folder), index
        try:
            header = json.loads((self.folder / "header.json").read_text())
            self._ids: np.ndarray = np.load(self.folder / "ids.npy", mmap_mode="r")
            segments = np.load(self.folder / "segments.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataFault(
                f"{self.folder}: the planning tables cannot be read ({error}); remove this folder"
            ) from None
        if header.get("version") != VERSION:
            raise DataFault(
                f"{self.folder}: tables of version {header.get('version')}, not {VERSION}; remove this folder"
            )
        self.fingerprint: str = header["fingerprint"]
        self.layout: Layout = header["layout"]
        self.count: int = header["records"]
        self.shard_firsts: tuple[int, ...] = tuple(header["shards"])
        self.training = tuple(_bucket_rows(entry, segments) for entry in header["training"])
        self.validation = tuple(_bucket_rows(entry, segments) for entry in header["validation"])
        columns = index.columns()
        self._keys: np.ndarray = columns.keys
        self._maps = [found for array in (self._ids, *vars(columns).values()) if (found := _map_of(array))]
        self._taken = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Tables, (self.folder, self._index)

    @property
    def shards(self) -> int:
        """Return how many shards all sources have together."""
        return self.shard_firsts[-1]

    def shard_of(self, number: int) -> tuple[int, int]:
        """Return (source, shard within it) of a shard that is counted through all sources."""
        source = int(np.searchsorted(self.shard_firsts, number, side="right")) - 1
        return source, number - self.shard_firsts[source]

    def take(self, rows: np.ndarray) -> tuple[list[int], list[bytes]]:
        """Return ids and keys of rows."""
        ids = self._ids[rows]
        keys = np.ascontiguousarray(self._keys[ids]).tobytes()
        self._taken += len(ids)
        if self._taken >= _RELEASE_ROWS:
            self.release()
        return ids.tolist(), [keys[i : i + 16] for i in range(0, len(keys), 16)]

    def release(self) -> None:
        """Unmap the touched pages of the tables and columns: they count as this process's memory; they stay cached."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)
        self._taken = 0


def _bucket_rows(entry: dict[str, Any], segments: np.ndarray) -> BucketRows:
    low, high = entry["segments"]
    bucket = Bucket(*entry["bucket"])
    return BucketRows(bucket, entry["first"], entry["records"], entry["uses"], entry["digest"], segments[low:high])


def _map_of(array: np.ndarray) -> mmap.mmap | None:
    """Return the map behind an array, where the system can release its pages."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    return base if hasattr(mmap, "MADV_DONTNEED") else None
