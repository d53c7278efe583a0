"""Reading tars in sequence: the same exact passes, but close together in the shards (data.tar_order=sequential)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import numpy as np

from difftrain.data.index.index import Index, IndexColumns
from difftrain.data.plan.tables import BucketRows, PlanTables
from difftrain.data.sources import open_source
from difftrain.diffusion.draws import key_of, words_of
from difftrain.diffusion.permutation import Permutation


def with_plain_shards(index: Index, size: int) -> IndexColumns:
    """Return an index's columns, with the records of each source of plain files cut into shards of `size`."""
    columns = index.columns()
    rows, shard = np.asarray(columns.row), np.array(columns.shard)
    id_of = np.zeros(int(rows.max(initial=0)) + 1, dtype=np.int64)
    id_of[rows] = np.arange(len(rows))
    for info in index.sources:
        if not open_source(info).sharded:
            # by path, so that a shard holds neighbours on the disk
            named = sorted((path, row) for row, _, path, _ in index.places([info.ordinal]))
            ids = id_of[np.fromiter((row for _, row in named), np.int64, len(named))]
            shard[ids] = np.arange(len(ids)) // size
    return replace(columns, shard=shard)


class Windows(NamedTuple):
    """One pass of one bucket: its uses by keyed shard order, and where the shuffling windows begin."""

    uses: RepeatSegments
    starts: np.ndarray  # (windows + 1,) in uses
    numbers: np.ndarray  # (windows,) of all shards' windows: those without a record of the bucket are left out
    key: bytes  # of the shuffles inside windows


class Slots(NamedTuple):
    """How the places of a global batch are dealt to streams: which stream each reads, and which of its rows."""

    streams: int
    rows_per_stream: int
    stream: np.ndarray
    row: np.ndarray

    @classmethod
    def of(cls, global_batch: int, most: int) -> Slots:
        """Take the largest number of streams, at most `most`, that divides a global batch."""
        # a stream must serve the same number of rows in every batch
        streams = max(s for s in range(1, min(most, global_batch) + 1) if global_batch % s == 0)
        slots = np.arange(global_batch)
        return cls(streams, global_batch // streams, slots % streams, slots // streams)


class SequentialOrder:
    """Order an epoch as S streams over keyed shard orders (see the head of this file)."""

    def __init__(self, tables: PlanTables, seed: int, batches: Sequence[int], streams: int, window: int) -> None:
        self.buckets, self._shards, self._seed, self.window = tables.training, tables.shards, seed, window
        self.slots = [Slots.of(global_batch, streams) for global_batch in batches]  # of each bucket
        self._repeats = [BucketRepeats(rows) for rows in self.buckets]
        self._windows = LruCache(2 * len(self.buckets) + 2)
        self._shard_orders = LruCache(4)
        self._shuffles = LruCache(4 * self.streams * len(self.buckets))

    @property
    def streams(self) -> int:
        """Return the number of streams; with global batches of several sizes, the largest."""
        return max(slots.streams for slots in self.slots)

    def pick(self, epoch: int, index: int, counts: np.ndarray) -> tuple[int, int]:
        """Return (bucket, k): the `index`-th of all batches sorted by their share (k + 1/2) / count, then by bucket."""
        return merged(index, counts)

    def positions(self, bucket: int, k: int, first: int, count: int) -> np.ndarray:
        """Return the positions of the endless stream that batch k of an epoch's `count` batches takes; the epoch begins at `first`."""
        slots = self.slots[bucket]
        g = slots.rows_per_stream
        # stream s reads the s-th of equal stretches of the epoch, g rows a batch
        positions: np.ndarray = first + slots.stream * (count * g) + k * g + slots.row
        return positions

    def rows(self, bucket: int, pass_: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and occurrences at offsets of one pass."""
        windows = self.windows(bucket, pass_)
        which = (np.searchsorted(windows.starts, offsets, side="right") - 1).tolist()
        uses = [self._shuffled(bucket, pass_, windows, w, o) for w, o in zip(which, offsets.tolist(), strict=True)]
        return windows.uses.find(pass_, np.array(uses, dtype=np.int64))

    def _shuffled(self, bucket: int, pass_: int, windows: Windows, w: int, offset: int) -> int:
        start, stop = int(windows.starts[w]), int(windows.starts[w + 1])
        number = int(windows.numbers[w])
        shuffle = self._shuffles.get(
            (bucket, pass_, number), lambda: Permutation(stop - start, windows.key, "window", number)
        )
        return start + shuffle(offset - start)

    def windows(self, bucket: int, pass_: int) -> Windows:
        """Lay out one pass of a bucket."""
        return self._windows.get((bucket, pass_), lambda: self._lay_out(bucket, pass_))

    def shard_order(self, pass_: int) -> np.ndarray:
        """Return the shards in the order in which a pass reads them, whatever the bucket."""
        return self._shard_orders.get(
            pass_, lambda: Permutation(self._shards, self._seed, "shards", pass_)(np.arange(self._shards))
        )

    def window_at(self, bucket: int, position: int) -> tuple[int, int]:
        """Return the positions at which the window around a position of the endless stream begins and ends."""
        pass_, offset = self._locate(bucket, position)
        starts = self.windows(bucket, pass_).starts
        w = int(np.searchsorted(starts, offset, side="right"))
        return position - offset + int(starts[w - 1]), position - offset + int(starts[w])

    def shards_at(self, bucket: int, position: int) -> list[int]:
        """Return the shards of the window around a position of the endless stream."""
        pass_, offset = self._locate(bucket, position)
        windows = self.windows(bucket, pass_)
        number = int(windows.numbers[int(np.searchsorted(windows.starts, offset, side="right")) - 1])
        shards: list[int] = self.shard_order(pass_)[number * self.window : (number + 1) * self.window].tolist()
        return shards

    def _locate(self, bucket: int, position: int) -> tuple[int, int]:
        passes, offsets = self._repeats[bucket].split(np.array([position]))
        return int(passes[0]), int(offsets[0])

    def _lay_out(self, bucket: int, pass_: int) -> Windows:
        segments = self.buckets[bucket].segments

        # segments in the order in which this pass reads their shards
        rank_of = np.empty(self._shards, dtype=np.int64)
        rank_of[self.shard_order(pass_)] = np.arange(self._shards)
        ranks = rank_of[segments["shard"]]
        order = np.argsort(ranks)

        # runs of `window` shards, of which those without a record of the bucket are left out
        numbers, uses = ranks[order] // self.window, self._repeats[bucket].ordered(order)
        ends = np.cumsum(uses.counts(pass_))
        last = np.flatnonzero(np.append(numbers[1:] != numbers[:-1], True))
        key = key_of(self._seed, "windows", *bucket_key(self.buckets[bucket]), pass_)
        return Windows(uses, np.append(0, ends[last]), numbers[last], key)


def merged(index: int, counts: np.ndarray) -> tuple[int, int]:
    """Return (b, k) of the `index`-th item, when items (b, k), k < counts[b], are sorted by (k + 1/2) / counts[b], b.

    Without a table: an item's rank is its share of the total, give or take half a place for every bucket, so that only
    the items around that share need sorting. The share is one correctly rounded division, the same on every machine.
    """
    total, slack = int(counts.sum()), len(counts)
    # counts of shares below are off by less than one a bucket, so the item lies between these two
    first = _below((index - slack) / total, counts)
    after = _below((index + slack + 1) / total, counts)
    # the few candidates, each bucket's k from its first
    number = after - first
    bucket = np.repeat(np.arange(len(counts)), number)
    k = np.arange(len(bucket)) - np.repeat(np.cumsum(number) - number - first, number)
    chosen = np.lexsort((bucket, _share(k, counts[bucket])))[index - int(first.sum())]
    return int(bucket[chosen]), int(k[chosen])


def _share(k: np.ndarray, counts: np.ndarray) -> np.ndarray:
    shares: np.ndarray = (2 * k + 1) / (2 * counts)
    return shares


def _below(share: float, counts: np.ndarray) -> np.ndarray:
    """Count each bucket's items whose share is below `share`."""
    some = np.maximum(counts, 1)
    number = np.clip(np.rint(share * counts).astype(np.int64), 0, counts)
    number -= (number > 0) & (_share(number - 1, some) >= share)  # rounding can be one off, never two
    number += (number < counts) & (_share(number, some) < share)
    return number


# --- How the uses of a bucket lie in its endless stream: pass by pass, one pass an epoch, repeats counted


T = TypeVar("T")


class LruCache:
    """Keep the values that were last asked for. Picklable: a copy starts empty."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Return the value of a key, made where it is not kept."""
        value = self._values.pop(key, None)
        if value is None:
            value = make()
            if len(self._values) >= self._limit:
                self._values.pop(next(iter(self._values)))
        self._values[key] = value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return LruCache, (self._limit,)


def bucket_key(rows: BucketRows) -> tuple[int, ...]:
    """Identify a bucket in keys: by its size and data set, so that another bucket more reshuffles nothing."""
    size = rows.bucket.height, rows.bucket.width, rows.bucket.frames
    return (*size, rows.dataset) if rows.dataset else size


class RepeatSegments:
    """The segments of a bucket in some order, and the uses of each in any pass.

    phase: of the extra uses, of each segment in the order of the table. Shape: (segments,).
    """

    def __init__(self, segments: np.ndarray, phase: np.ndarray) -> None:
        self._first, self._records, self._repeats = (np.array(segments[n]) for n in ("first", "records", "repeats"))
        self._extra, self._of, self._phase = np.array(segments["extra"]), np.array(segments["of"]), phase
        self.even = not self._extra.any()  # every pass is like the first
        self._starts = LruCache(4)

    def extras(self, pass_: int) -> np.ndarray:
        """Return X of a pass: how many extra uses each segment has before it."""
        extras: np.ndarray = (pass_ * self._records * self._extra + self._phase) // self._of
        return extras

    def counts(self, pass_: int) -> np.ndarray:
        """Return the uses of each segment in a pass."""
        counts: np.ndarray = self._records * self._repeats
        return counts if self.even else counts + self.extras(pass_ + 1) - self.extras(pass_)

    def before(self, pass_: int) -> int:
        """Count the uses before a pass."""
        uses = pass_ * int((self._records * self._repeats).sum())
        return uses if self.even else uses + int(self.extras(pass_).sum())

    def before_each(self, passes: np.ndarray) -> np.ndarray:
        """Count the uses before each of several passes."""
        before: np.ndarray = passes * int((self._records * self._repeats).sum())
        extras = zip(self._records.tolist(), self._extra.tolist(), self._of.tolist(), self._phase.tolist(), strict=True)
        for records, extra, of, phase in extras if not self.even else ():
            before = before + (passes * (records * extra) + phase) // of
        return before

    def find(self, pass_: int, uses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and occurrences of uses in a pass: an occurrence is the number of the record's uses before."""
        starts = self._starts.get(0 if self.even else pass_, lambda: np.append(0, np.cumsum(self.counts(pass_))))
        segment = np.searchsorted(starts, uses, side="right") - 1
        use, repeats = uses - starts[segment], self._repeats[segment]
        if self.even:
            # whole repeats: record after record, each `repeats` times in a row
            row, repeat = np.divmod(use, repeats)
            return self._first[segment] + row, pass_ * repeats + repeat
        records, gone = self._records[segment], self.extras(pass_)[segment]
        # fractions: after the whole repeats, `extra` of the records once more, in turn from pass to pass
        extra = use - records * repeats
        row, repeat = np.divmod(use, np.maximum(repeats, 1))
        row, repeat = np.where(extra < 0, row, (gone + extra) % records), np.where(extra < 0, repeat, repeats)
        return self._first[segment] + row, pass_ * repeats + (gone - row - 1) // records + 1 + repeat


class BucketRepeats:
    """The endless stream of a bucket, cut into passes. rate: uses of a pass, on average."""

    def __init__(self, rows: BucketRows) -> None:
        self._table = rows.segments
        shift = words_of("extra uses", *bucket_key(rows), count=1)[0] >> 1
        self._phase = (np.asarray(rows.segments["first"]) - rows.first + shift) % np.asarray(rows.segments["of"])
        self.segments = RepeatSegments(self._table, self._phase)
        self.fractional = 0 if self.segments.even else int(np.count_nonzero(rows.segments["extra"]))
        pieces = np.unique(rows.segments[["extra", "of"]]) if self.fractional else ()
        self.period = math.lcm(*(int(of) for extra, of in pieces if extra))  # passes until their lengths come round
        self.rate = Fraction(int((rows.segments["records"] * rows.segments["repeats"]).sum()))
        for extra, of in (map(int, piece) for piece in pieces):
            # summed as fractions, so that the rate is exact
            own = (rows.segments["extra"] == extra) & (rows.segments["of"] == of)
            self.rate += int(rows.segments["records"][own].sum()) * Fraction(extra, of)

    def ordered(self, order: np.ndarray) -> RepeatSegments:
        """Return the segments in another order."""
        return RepeatSegments(self._table[order], self._phase[order])

    def before(self, pass_: int) -> int:
        """Count the uses before a pass."""
        return self.segments.before(pass_)

    def uses(self, pass_: int) -> int:
        """Count the uses of a pass."""
        return self.before(pass_ + 1) - self.before(pass_)

    def uses_of_passes(self, number: int) -> np.ndarray:
        """Count the uses of the first passes, each by itself."""
        before: np.ndarray = self.segments.before_each(np.arange(number + 1))
        return np.diff(before)

    def pass_of(self, position: int) -> int:
        """Return the pass that a position of the stream lies in."""
        slack = self.fractional + 1  # each segment's extra uses are less than one off their average
        low, high = max(0, (position - slack) // self.rate), (position + slack) // self.rate + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.before(middle) <= position else (low, middle)
        return int(low)

    def split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pass of each position, and the offset within it."""
        if self.segments.even:
            return np.divmod(positions, int(self.rate))
        first, most = self.pass_of(int(positions.min())), int(positions.max())
        starts = [self.before(first)]
        while starts[-1] <= most:
            starts.append(self.before(first + len(starts)))
        which = np.searchsorted(starts, positions, side="right") - 1
        return first + which, positions - np.array(starts)[which]
