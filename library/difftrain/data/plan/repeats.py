"""How the uses of a bucket lie in its endless stream: pass by pass, one pass an epoch, repeats counted."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from difftrain.data.plan.tables import BucketRows
from difftrain.diffusion.keys import words_of

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

    def find(self, pass_: int, uses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and occurrences of uses in a pass: an occurrence is the number of the record's uses before."""
        starts = self._starts.get(0 if self.even else pass_, lambda: np.append(0, np.cumsum(self.counts(pass_))))
        segment = np.searchsorted(starts, uses, side="right") - 1
        use, repeats = uses - starts[segment], self._repeats[segment]
        if self.even:
            row, repeat = np.divmod(use, repeats)
            return self._first[segment] + row, pass_ * repeats + repeat
        records, gone = self._records[segment], self.extras(pass_)[segment]
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
        self.rate = Fraction(int((rows.segments["records"] * rows.segments["repeats"]).sum()))
        for extra, of in (map(int, piece) for piece in pieces):
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
