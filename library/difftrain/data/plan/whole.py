"""Whole global batches: every step is of one bucket, and takes as many draws as any other.

Every bucket is an endless stream: pass p is a keyed permutation of its uses (repeats counted), and epoch e owns
batches floor(e n / G) to floor((e + 1) n / G) of the stream. So nothing is dropped or padded, every use comes once a
pass, and any position is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from difftrain.contracts import Bucket, Draw
from difftrain.data.plan.plan import WHOLE_BATCHES, EpochPlan, RankShare, Uses
from difftrain.data.plan.sequential import BucketRepeats, LruCache, SequentialOrder, bucket_key
from difftrain.data.plan.tables import BucketRows, PlanTables
from difftrain.diffusion.permutation import Permutation

ALL = slice(None)


class BatchOrder(Protocol):
    """How an epoch's batches follow one another, and what each takes of its bucket's stream."""

    def pick(self, epoch: int, index: int, counts: np.ndarray) -> tuple[int, int]: ...
    def positions(self, bucket: int, k: int, first: int, count: int) -> np.ndarray: ...
    def rows(self, bucket: int, pass_: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


class RandomOrder:
    """Shuffle each bucket's pass, and the epoch's batches over buckets."""

    layout = "key"

    def __init__(self, tables: PlanTables, seed: int, batches: Sequence[int]) -> None:
        self._seed, self._batches = seed, batches
        self._buckets = tables.training
        self._repeats = [BucketRepeats(rows) for rows in self._buckets]
        self._permutations = LruCache(256)

    def epoch(self, epoch: int, total: int) -> Permutation:
        """Return the order of an epoch's batches, of all buckets together."""
        return self._permutations.get(("epoch", epoch), lambda: Permutation(total, self._seed, "epoch", epoch))

    def pick(self, epoch: int, index: int, counts: np.ndarray) -> tuple[int, int]:
        """Return (bucket, its k-th batch of this epoch) of the epoch's batch number `index`."""
        ends = np.cumsum(counts)
        slot = self.epoch(epoch, int(ends[-1]))(index)
        bucket = int(np.searchsorted(ends, slot, side="right"))
        return bucket, slot - int(ends[bucket] - counts[bucket])

    def positions(self, bucket: int, k: int, first: int, count: int) -> np.ndarray:
        """Return the positions in the endless stream that batch k of an epoch takes; the epoch begins at `first`."""
        start = first + k * self._batches[bucket]
        return np.arange(start, start + self._batches[bucket])

    def rows(self, bucket: int, pass_: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and occurrences at offsets of one pass."""
        rows, repeats = self._buckets[bucket], self._repeats[bucket]
        permutation = self._permutations.get(
            (bucket, pass_), lambda: Permutation(repeats.uses(pass_), self._seed, "pass", *bucket_key(rows), pass_)
        )
        return repeats.segments.find(pass_, permutation(offsets))


class WholePlan(EpochPlan):
    """Serve whole global batches of one bucket.

    global_batch: one number, or that of each data set; a batch is of one bucket, so of one data set.
    """

    kind = WHOLE_BATCHES

    def __init__(
        self,
        tables: PlanTables,
        seed: int,
        global_batch: int | Sequence[int],
        order: str = "random",
        *,
        streams: int = 64,
        window: int = 4,
    ) -> None:
        super().__init__(tables, seed, (global_batch,) if isinstance(global_batch, int) else global_batch, order)

        # uses of each bucket a pass: the same in every one, or with fractions of repeats
        self._even_uses = np.array([0 if p.fractional else int(p.rate) for p in self._repeats], dtype=np.int64)
        self._fractional = [number for number, repeats in enumerate(self._repeats) if repeats.fractional]
        batches = [self.global_batches[rows.group] for rows in self.buckets]
        self._batches = np.array(batches, dtype=np.int64)

        # batches an epoch on average, as the fraction share / per
        self._per = math.lcm(*batches)
        shares = (repeats.rate * (self._per // batch) for repeats, batch in zip(self._repeats, batches, strict=True))
        share = sum(shares, Fraction(0))
        self._share = share.numerator if share.denominator == 1 else share
        self._uneven = sum(repeats.fractional for repeats in self._repeats)
        self.per_epoch = share / self._per

        # how batches follow one another
        self._settings: dict[str, Any] = {"order": order}
        self.arrangement: BatchOrder
        if order == "sequential":
            self._settings |= {"streams": streams, "window": window}
            self.arrangement = SequentialOrder(tables, seed, batches, streams, window)
        else:
            self.arrangement = RandomOrder(tables, seed, batches)

    @property
    def starved(self) -> list[BucketRows]:
        """Return the buckets that are smaller than the global batch: they are served every few epochs."""
        return [rows for rows in self.buckets if rows.uses < self.global_batches[rows.group]]

    def served(self, epoch: int) -> np.ndarray:
        """Return how many batches of each bucket come before an epoch."""
        # uses of full passes over batch size: what is left over begins the next epoch's first batch
        uses = epoch * self._even_uses
        for bucket in self._fractional:
            uses[bucket] = self._repeats[bucket].before(epoch)
        return uses // self._batches

    def steps_before(self, epoch: int) -> int:
        """Return how many steps of the data come before an epoch; epochs differ by at most the number of buckets."""
        return int(self.served(epoch).sum())

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, index within it) of a step."""
        position = self._position(step)
        # total_steps(e) lies within one batch a bucket of e * (sum of uses / G), and one use for every segment with a
        # fraction of repeats, so that the bracket is narrow.
        low = max(0, (position - self._uneven) * self._per // self._share)
        high = (position + len(self.buckets) + 1 + self._uneven) * self._per // self._share + 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.total_steps(middle) <= step:
                low = middle
            else:
                high = middle
        return low, step - self.total_steps(low)

    def uses_of(self, step: int, part: slice = ALL) -> Uses:
        """Return the draws of a global batch as rows; `part` cuts them, so that a rank computes its own only."""
        # which batch of which bucket
        epoch, index = self.locate(step)
        served = self.served(epoch)
        counts = self.served(epoch + 1) - served
        bucket, k = self.arrangement.pick(epoch, index, counts)
        # the stream of a bucket is endless: this epoch begins where the last one's full batches ended
        first = int(served[bucket]) * int(self._batches[bucket])
        positions = self.arrangement.positions(bucket, k, first, int(counts[bucket]))[part]

        # positions of the bucket's stream to rows, a pass at a time: a batch may lie across two
        passes, offsets = self._repeats[bucket].split(positions)
        rows, occurrences = np.empty_like(positions), np.empty_like(positions)
        for pass_ in np.unique(passes).tolist():
            own = passes == pass_
            rows[own], occurrences[own] = self.arrangement.rows(bucket, pass_, offsets[own])
        return Uses(self.buckets[bucket], rows, occurrences)

    def group(self, step: int) -> int:
        """Return which of the batch sizes a global batch has."""
        return 0 if self._single else self._bucket(step).group

    def _bucket(self, step: int) -> BucketRows:
        epoch, index = self.locate(step)
        bucket, _ = self.arrangement.pick(epoch, index, self.served(epoch + 1) - self.served(epoch))
        return self.buckets[bucket]

    def counts(self, step: int) -> list[tuple[BucketRows, int]]:
        """Return the bucket of a global batch, and its size."""
        rows = self._bucket(step)
        return [(rows, self.global_batches[rows.group])]

    def parts(self, step: int) -> list[Uses]:
        """Return the draws of a global batch, which are of one bucket."""
        return [self.uses_of(step)]

    def micro_batch(self, step: int, number: int, share: RankShare) -> Uses:
        """Return a rank's micro batch of a step."""
        return self.uses_of(step, share.part(number, self.group(step)))

    def batch(self, step: int, part: slice = ALL) -> tuple[Bucket, list[Draw]]:
        """Return bucket and draws of global batch `step`; rank r takes part = slice(r, None, dp_size)."""
        uses = self.uses_of(step, part)
        return uses.bucket.bucket, self.draws(uses)

    def describe(self) -> dict[str, Any]:
        """Return what the digest stands for; version 0.5 wrote the same."""
        return self._described(self._settings)

    @property
    def _single(self) -> bool:
        return len(self.global_batches) == 1

    def lines(self) -> list[str]:
        """Say how steps and epochs come about, and which buckets starve."""
        buckets, batch = len(self.buckets), ", ".join(map(str, self.global_batches))
        lines = [
            f"{self.uses} samples an epoch (repeats counted) in {buckets} bucket{'s'[: buckets > 1]}, "
            f"global batch {batch}{'' if self._single else ' by data set'}: "
            f"{self.steps(0)} steps in the first epoch, {float(self.per_epoch):.2f} on average"
        ]
        for rows in self.starved:
            needed = self.global_batches[rows.group]
            lines.append(
                f"bucket {self.tables.name(rows)} has {rows.uses} samples an epoch, fewer than the global batch {needed}: "
                f"used about every {needed / rows.uses:.1f} epochs, nothing dropped"
            )
        return lines
