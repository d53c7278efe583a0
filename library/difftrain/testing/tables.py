"""Planning tables without pictures: for tests and benchmarks of plans."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from difftrain.contracts import Bucket
from difftrain.data.plan.table_build import HeldOutSplit, PlanSource, build_tables
from difftrain.data.plan.tables import Layout, PlanTables


class Item(NamedTuple):
    """One made-up record."""

    name: str
    bucket: Bucket = Bucket(64, 64)
    source: int = 0
    shard: int = 0

    @property
    def key(self) -> bytes:
        """Return the key that its name gives."""
        return hashlib.blake2b(self.name.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class MemoryColumns:
    """The columns that plans need, in memory."""

    keys: np.ndarray
    source: np.ndarray
    shard: np.ndarray


class MemoryIndex:
    """An index of made-up records: ids follow the keys, as in a real one. Of its files, only the keys are written."""

    def __init__(self, folder: Path, items: Sequence[Item]) -> None:
        self.items = sorted(items, key=lambda item: item.key)
        keys = np.frombuffer(b"".join(item.key for item in self.items), dtype=np.uint8).reshape(-1, 16)
        source = np.array([item.source for item in self.items], dtype=np.uint16)
        shard = np.array([item.shard for item in self.items], dtype=np.uint32)
        self._columns = MemoryColumns(keys, source, shard)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "keys.npy", keys)

    def columns(self) -> MemoryColumns:
        """Return the columns."""
        return self._columns


def make_tables(
    folder: Path,
    items: Sequence[Item],
    repeats: Sequence[float] | Sequence[PlanSource] = (1,),
    *,
    split: HeldOutSplit | None = None,
    layout: Layout = "key",
) -> PlanTables:
    """Build and open tables of made-up records. An item of bucket (0, 0) fits none."""
    index = MemoryIndex(folder, items)
    buckets = [bucket for bucket in dict.fromkeys(item.bucket for item in items) if bucket.height]
    places = {bucket: position for position, bucket in enumerate(buckets)}  # by appearance, which must not matter
    build_tables(
        folder / "tables",
        index.columns(),
        buckets,
        np.array([places.get(item.bucket, -1) for item in index.items]),
        repeats,
        split=split or HeldOutSplit(),
        layout=layout,
        fingerprint="made up",
    )
    return PlanTables(folder / "tables", folder)


def by_id(items: Sequence[Item]) -> list[Item]:
    """Return items in the order of the ids that they get."""
    return sorted(items, key=lambda item: item.key)
