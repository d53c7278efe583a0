"""Shards of plain files: so many files in the order of their paths are read as one where data are read in sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from difftrain.data.index import Columns, Index
from difftrain.data.sources import open_source


def with_plain_shards(index: Index, size: int) -> Columns:
    """Return an index's columns, with the records of each source of plain files cut into shards of `size`."""
    columns = index.columns()
    rows, shard = np.asarray(columns.row), np.array(columns.shard)
    id_of = np.zeros(int(rows.max(initial=0)) + 1, dtype=np.int64)
    id_of[rows] = np.arange(len(rows))
    for info in index.sources:
        if not open_source(info).sharded:
            named = sorted((path, row) for row, _, path, _ in index.places([info.ordinal]))
            ids = id_of[np.fromiter((row for _, row in named), np.int64, len(named))]
            shard[ids] = np.arange(len(ids)) // size
    return replace(columns, shard=shard)
