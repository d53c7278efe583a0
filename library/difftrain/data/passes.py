"""How the uses of a bucket lie in its endless stream: pass by pass, one pass an epoch, repeats counted.

A record with w + p / q repeats is used w times in every pass, and once more in p of q passes. The extra uses of a segment
of m records are an endless stream of their own, row after row: pass t takes the places X(t) to X(t + 1) - 1 of it,
X(t) = floor((t m p + f) / q), f a phase below q. So each record has its extra use in every lap of m places exactly once,
two passes differ by at most one extra use a segment, and everything before any pass is counted by arithmetic.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from difftrain.data.recent import Recent
from difftrain.data.tables import BucketRows
from difftrain.diffusion.keys import words_of


def bucket_key(rows: BucketRows) -> tuple[int, ...]:
    """Identify a bucket in keys: by its size and data set, so that another bucket more reshuffles nothing."""
    size = rows.bucket.height, rows.bucket.width, rows.bucket.frames
    return (*size, rows.dataset) if rows.dataset else size


class Segments:
    """The segments of a bucket in some order, and the uses of each in any pass.

    phase: of the extra uses, of each segment in the order of the table. Shape: (segments,).
    """

    def __init__(self, segments: np.ndarray, phase: np.ndarray) -> None:
        self._first, self._records, self._repeats = (np.array(segments[n]) for n in ("first", "records", "repeats"))
        self._extra, self._of, self._phase = np.array(segments["extra"]), np.array(segments["of"]), phase
        self.whole = not self._extra.any()
        self._kept = Recent(4)

    def extras(self, pass_: int) -> np.ndarray:
        """Return X of a pass: how many extra uses each segment has before it."""
        found: np.ndarray = (pass_ * self._records * self._extra + self._phase) // self._of
        return found

    def counts(self, pass_: int) -> np.ndarray:
        """Return the uses of each segment in a pass."""
        found: np.ndarray = self._records * self._repeats
        return found if self.whole else found + self.extras(pass_ + 1) - self.extras(pass_)

    def before(self, pass_: int) -> int:
        """Count the uses before a pass."""
        whole = pass_ * int((self._records * self._repeats).sum())
        return whole if self.whole else whole + int(self.extras(pass_).sum())

    def find(self, pass_: int, uses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and occurrences of uses in a pass: an occurrence is the number of the record's uses before."""
        starts = self._kept.get(0 if self.whole else pass_, lambda: np.append(0, np.cumsum(self.counts(pass_))))
        segment = np.searchsorted(starts, uses, side="right") - 1
        use, repeats = uses - starts[segment], self._repeats[segment]
        if self.whole:
            row, repeat = np.divmod(use, repeats)
            return self._first[segment] + row, pass_ * repeats + repeat
        records, gone = self._records[segment], self.extras(pass_)[segment]
        extra = use - records * repeats
        row, repeat = np.divmod(use, np.maximum(repeats, 1))
        row, repeat = np.where(extra < 0, row, (gone + extra) % records), np.where(extra < 0, repeat, repeats)
        return self._first[segment] + row, pass_ * repeats + (gone - row - 1) // records + 1 + repeat


class Passes:
    """The endless stream of a bucket, cut into passes. rate: uses of a pass, on average."""

    def __init__(self, rows: BucketRows) -> None:
        self._table = rows.segments
        shift = words_of("extra uses", *bucket_key(rows), count=1)[0] >> 1
        self._phase = (np.asarray(rows.segments["first"]) - rows.first + shift) % np.asarray(rows.segments["of"])
        self.segments = Segments(self._table, self._phase)
        self.fractional = 0 if self.segments.whole else int(np.count_nonzero(rows.segments["extra"]))
        pieces = np.unique(rows.segments[["extra", "of"]]) if self.fractional else ()
        self.rate = Fraction(int((rows.segments["records"] * rows.segments["repeats"]).sum()))
        for extra, of in (map(int, piece) for piece in pieces):
            own = (rows.segments["extra"] == extra) & (rows.segments["of"] == of)
            self.rate += int(rows.segments["records"][own].sum()) * Fraction(extra, of)

    def ordered(self, order: np.ndarray) -> Segments:
        """Return the segments in another order."""
        return Segments(self._table[order], self._phase[order])

    def before(self, pass_: int) -> int:
        """Count the uses before a pass."""
        return self.segments.before(pass_)

    def uses(self, pass_: int) -> int:
        """Count the uses of a pass."""
        return self.before(pass_ + 1) - self.before(pass_)

    def pass_of(self, place: int) -> int:
        """Return the pass that a place of the stream lies in."""
        slack = self.fractional + 1  # each segment's extra uses are less than one off their average
        low, high = max(0, (place - slack) // self.rate), (place + slack) // self.rate + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.before(middle) <= place else (low, middle)
        return int(low)

    def split(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pass of each place, and its place within it."""
        if self.segments.whole:
            return np.divmod(places, int(self.rate))
        first, most = self.pass_of(int(places.min())), int(places.max())
        starts = [self.before(first)]
        while starts[-1] <= most:
            starts.append(self.before(first + len(starts)))
        which = np.searchsorted(starts, places, side="right") - 1
        return first + which, places - np.array(starts)[which]
