"""Columnar tables for planning: the ids of each bucket's records, in an order that only keys and settings decide.

One file of uint32 ids beside a JSON header: SQLite would scan 0.6 s a million. table_build.py writes them; every rank
and worker reads them in place, in constant memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from difftrain.contracts import Bucket, DataFault
from difftrain.data.index.column import Column

VERSION = 2
# repeats: whole ones; and extra / of of one more
SEGMENT = np.dtype([(name, "<i8") for name in ("shard", "first", "records", "repeats", "extra", "of")])

Layout = Literal["key", "shard"]  # rows of a bucket by (repeats, key), or by (shard, key) to read tars in sequence


@dataclass(frozen=True)
class BucketRows:
    """The rows of one bucket of one data set. A segment is a run of them with one number of repeats (and one shard)."""

    bucket: Bucket
    first: int
    records: int
    uses: int | float  # with repeats counted, in an epoch on average
    digest: str  # of keys, repeats and their order
    segments: np.ndarray  # SEGMENT, memory-mapped
    dataset: int = 0  # of several [[datasets]]: each has buckets and a batch size of its own
    group: int = 0  # which of a run's batch sizes is theirs: by data set, and images beside clips may have their own


def total_uses(rows: Iterable[BucketRows]) -> int | float:
    """Sum the uses of buckets; a whole number where it is one."""
    uses = round(sum(bucket.uses for bucket in rows), 6)
    return int(uses) if uses == int(uses) else uses


class PlanTables:
    """Read tables: what each bucket holds, and the id and key of any row. Picklable.

    folder: the tables'. index_folder: that of the index they are of, for its column of keys.
    Raises: DataFault where a file is missing or damaged.
    """

    def __init__(self, folder: Path, index_folder: Path) -> None:
        self.folder, self._index_folder = Path(folder), Path(index_folder)
        try:
            header = json.loads((self.folder / "header.json").read_text())
            self._ids = Column(self.folder / "ids.npy")
            self._keys = Column(self._index_folder / "keys.npy")
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
        self.unplaced: int = header["unplaced"]  # records that fit no bucket: the last rows
        self.reg_uses: int = header.get("reg_uses", 0)  # of regularisation pictures, among all of the training
        self.left_out: int = header.get("left_out", 0)  # by subsample_ratio: the rows before those
        self.surplus: int = header.get("surplus", 0)  # regularisation pictures that no epoch uses: the rows before

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanTables, (self.folder, self._index_folder)

    def name(self, rows: BucketRows) -> str:
        """Name a bucket; of several data sets, with its own."""
        several = any(bucket.dataset for bucket in (*self.training, *self.validation))
        return f"{rows.bucket} of data set {rows.dataset + 1}" if several else str(rows.bucket)

    @property
    def shards(self) -> int:
        """Return how many shards all sources have together."""
        return self.shard_firsts[-1]

    def shard_of(self, number: int) -> tuple[int, int]:
        """Return (source, shard within it) of a shard that is counted through all sources."""
        source = int(np.searchsorted(self.shard_firsts, number, side="right")) - 1
        return source, number - self.shard_firsts[source]

    def ids(self) -> np.ndarray:
        """Return the ids of all rows, memory-mapped."""
        mapped: np.ndarray = np.load(self.folder / "ids.npy", mmap_mode="r")
        return mapped

    def take(self, rows: np.ndarray) -> tuple[list[int], list[bytes]]:
        """Return ids and keys of rows."""
        ids: list[int] = self._ids.take(rows.tolist()).tolist()
        keys = self._keys.take(ids).tobytes()
        return ids, [keys[i : i + 16] for i in range(0, len(keys), 16)]


def _bucket_rows(entry: dict[str, Any], segments: np.ndarray) -> BucketRows:
    low, high = entry["segments"]
    bucket = Bucket(*entry["bucket"])
    rows = segments[low:high]
    return BucketRows(
        bucket,
        entry["first"],
        entry["records"],
        entry["uses"],
        entry["digest"],
        rows,
        entry.get("dataset", 0),
        entry.get("group", entry.get("dataset", 0)),
    )
