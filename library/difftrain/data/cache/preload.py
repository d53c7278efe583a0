"""Copying what a run reads of a cache into memory that all processes of a machine share."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from difftrain.contracts import ConfigFault, Fault
from difftrain.data.cache.format import ADDRESS, ALIGN, Damaged, Item
from difftrain.data.cache.memory import PLACE, MemoryEntries, MemorySink, halves, row_of
from difftrain.data.cache.segments import Source, checked_payload, damage

if TYPE_CHECKING:
    from difftrain.data.cache.metadata import Metadata, Row

log = logging.getLogger("difftrain")
_SAY_EVERY_S = 10.0
_AT_ONCE = 64 << 20  # bytes that are asked for together


def preload(metadata: Metadata, source: Source, addresses: np.ndarray, room_bytes: int | None, cache: str) -> str:
    """Copy entries to memory in the order in which they lie, each checked; return the path for MemoryEntries.

    One process of a machine does it. room_bytes: memory that is free, None where that is not known. Shapes: addresses
    (N,) V16. Raises: ConfigFault where they do not fit, TrainingFault for one that is damaged.
    """
    names: dict[str, int] = {}
    found = (
        (
            *halves(address.tobytes()),
            row.offset,
            row.length,
            names.setdefault(row.segment, len(names)),
            row.crc,
            row.kind,
            0,
        )
        for address, row in _with_rows(metadata, addresses)
    )
    wanted = np.fromiter(found, PLACE)
    total = int((-(-wanted["length"].astype(np.int64) // ALIGN) * ALIGN).sum())
    if room_bytes is not None and total > room_bytes:
        what = f"the cache's {total / 2**30:.3g} GiB do not fit into the {room_bytes / 2**30:.3g} GiB that are free"
        raise ConfigFault([Fault("--cache_preload", what, "without it, the cache is read where it lies")])
    segments = list(names)
    by_name = np.empty(len(segments), np.int64)
    by_name[sorted(range(len(segments)), key=segments.__getitem__)] = np.arange(len(segments))
    wanted = wanted[np.lexsort((wanted["offset"], by_name[wanted["segment"]] if segments else wanted["segment"]))]
    sink = MemorySink()
    log.info("--cache_preload: %s entries, %.3g GiB, are copied into memory", f"{len(wanted):,}", total / 2**30)
    said = time.monotonic()
    for group in _groups(wanted):
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            log.info("--cache_preload: %s of %s entries", f"{sink.written:,}", f"{len(wanted):,}")
        rows = [row_of(0, segments, place) for place in group]
        source.want([(row.segment, row.offset, row.length) for row in rows])
        for place, row in zip(group, rows, strict=True):
            address = int(place["high"]).to_bytes(8, "big") + int(place["low"]).to_bytes(8, "big")
            try:
                sink.append([Item(address, [checked_payload(source, row)], row.kind)])
            except Damaged as error:
                raise damage(cache, row, error) from error
    sink.close()
    return MemoryEntries.reserve([sink.rows()])


def _with_rows(metadata: Metadata, addresses: np.ndarray) -> Iterator[tuple[Any, Row]]:
    for address in np.unique(np.ascontiguousarray(addresses).view(">u8").reshape(-1, 2), axis=0).view(ADDRESS).ravel():
        row = metadata.lookup(address.tobytes())
        if row is not None:
            yield address, row


def _groups(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Cut rows into groups of about as many bytes as are asked for together."""
    ends = np.cumsum(rows["length"].astype(np.int64))
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _AT_ONCE, side="right")))
        yield rows[start:stop]
        start = stop
