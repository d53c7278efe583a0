"""Which records are held out where several sources show the same pictures: one lot for a picture, whatever its size.

A record's lot is the hash of its key, and the key has its source in it. So where the folders of two sources overlap, as
with one folder at two resolutions, a picture is known by its path instead: held out of one, it is held out of all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from difftrain.data.inspection import record_key
from difftrain.data.table_build import Split

if TYPE_CHECKING:
    from difftrain.data.index import Index
    from difftrain.data.sources import SourceInfo


def held_out(index: Index, shares: Sequence[float], seed: int) -> np.ndarray:
    """Return a mask over the records. shares: of each source; of those that overlap, the largest counts for all.

    Regularisation pictures are never held out, as in kohya's scripts.
    """
    sources, columns = index.sources, index.columns()
    tops = _tops(sources)
    together = {top: [n for n, each in enumerate(tops) if each == top] for top in set(tops)}
    common = [max(shares[n] for n in together[top]) for top in tops]
    common = [0.0 if info.is_reg else share for info, share in zip(sources, common, strict=True)]
    overlapping = [info.ordinal for info, top in zip(sources, tops, strict=True) if len(together[top]) > 1]
    lots = _lots(index, overlapping, tops) if overlapping and any(common) else columns.keys
    found = np.zeros(len(columns.keys), dtype=bool)
    source = np.asarray(columns.source)
    for share in sorted(set(common) - {0.0}):
        own = np.array([each == share for each in common])[source]
        found[own] = Split(share, seed).held_out(lots[own])
    return found


def overlaps(sources: Sequence[SourceInfo]) -> bool:
    """Tell whether two sources may show the same picture."""
    return len(set(_tops(sources))) < len(sources)


def _tops(sources: Sequence[SourceInfo]) -> list[PurePath]:
    """Return for each source the outermost folder among those of all sources that it lies in."""
    places = [
        PurePath(info.root, info.prefix, info.only if info.kind in ("tar", "parquet") else "") for info in sources
    ]
    known = set(places)
    return [next(top for top in (*reversed(place.parents), place) if top in known) for place in places]


def _lots(index: Index, ordinals: Sequence[int], tops: Sequence[PurePath]) -> np.ndarray:
    """Return the keys with those of overlapping sources replaced by what their pictures' paths give."""
    columns = index.columns()
    lots = np.array(columns.keys)
    id_of = np.empty(int(columns.row.max()) + 1, dtype=np.int64)
    id_of[columns.row] = np.arange(len(columns.row))
    for row, source, path, member in index.places(ordinals):
        place = os.path.normpath(os.path.join(index.sources[source].root, path))  # noqa: PTH118 - no link is followed
        name = os.path.relpath(place, tops[source]) + (f"!{member}" if member else "")
        lots[id_of[row]] = np.frombuffer(record_key("overlapping sources", name), dtype=np.uint8)
    return lots
