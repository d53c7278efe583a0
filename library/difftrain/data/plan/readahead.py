"""Ask the system for the shards that a sequential run will read next, at the pace at which it reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.data.plan.sequential import LruCache, SequentialOrder
from difftrain.data.plan.whole import WholePlan

if TYPE_CHECKING:
    from difftrain.data.index.index import Index

_PIECE = 8 << 20  # bytes of one request: long enough to be read in sequence, short enough not to flood the cache


class Readahead:
    """Before each batch, request the matching part of the window of shards that comes after the present one.

    A stream that has gone through a third of its window has requested a third of the next. The pace is set by the
    bucket with the most uses; the other buckets read the same shards at the same time. Stateless: any worker may
    make any batch.
    """

    def __init__(self, index: Index, plan: WholePlan) -> None:
        self._index, self._plan = index, plan
        uses = [rows.uses for rows in plan.buckets]
        self._pacer = uses.index(max(uses))
        self._files = LruCache(1024)
        self._paths = LruCache(16)

    def advise(self, step: int, part: slice) -> int:
        """Request what follows the streams that begin in `part` of a batch; return the number of bytes."""
        order = self._plan.arrangement
        if not isinstance(order, SequentialOrder) or not hasattr(os, "posix_fadvise"):
            return 0
        requested = 0
        for shards, low, high, of in self._ahead(order, step, part):
            files = [self._file(shard) for shard in shards]
            total = sum(size for _, size in files)
            for piece in range(-(-low * total // of // _PIECE), -(-high * total // of // _PIECE)):
                requested += _request(files, piece * _PIECE)
        return requested

    def _ahead(self, order: SequentialOrder, step: int, part: slice) -> Iterator[tuple[list[int], int, int, int]]:
        """Yield (shards of the next window, from, to, of): the share of them to request, in uses of the present one."""
        epoch, index = self._plan.locate(step)
        served, after, last = (self._plan.served(epoch + i) for i in range(3))
        bucket, k = order.pick(epoch, index, after - served)
        if bucket != self._pacer:
            return

        slots = order.slots[bucket]
        g, batch = slots.rows_per_stream, slots.streams * slots.rows_per_stream
        count, coming = int(after[bucket] - served[bucket]), int(last[bucket] - after[bucket])
        for slot in range(batch)[part]:
            if slot >= slots.streams:
                break
            start = int(served[bucket]) * batch + slot * count * g  # this stream's share of the epoch
            stop = start + count * g
            here = start + k * g
            first, end = order.window_at(bucket, here)
            low, high = max(first, start), min(end, stop)
            if high < stop:
                following = high
            elif coming:
                following = int(after[bucket]) * batch + slot * coming * g
            else:
                continue
            shards = order.shards_at(bucket, following)
            yield shards, here - low, min(here + g, high) - low, high - low

    def _file(self, shard: int) -> tuple[Path, int]:
        return self._files.get(shard, lambda: self._look(shard))

    def _look(self, shard: int) -> tuple[Path, int]:
        """Return path and size of a shard; size 0 for a folder of plain files, or what cannot be read."""
        source, number = self._plan.tables.shard_of(shard)
        paths = self._paths.get(source, lambda: self._index.shard_paths(source) or [""])
        if not paths[0]:
            return Path(), 0
        path = Path(self._index.sources[source].root) / paths[number]
        try:
            return path, path.stat().st_size
        except OSError:
            return path, 0  # reading it will say what is wrong


def _request(files: list[tuple[Path, int]], offset: int) -> int:
    """Request one piece of files that are thought of as one after another."""
    requested = 0
    left = _PIECE
    for path, size in files:
        if offset < size and left:
            length = min(left, size - offset)
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError:
                return requested
            try:
                os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
            requested += length
            left -= length
        offset = max(0, offset - size)
    return requested
