"""Every record in every epoch, as kohya's scripts have it: a bucket's last micro batch is smaller.

In epoch e bucket b has ceil(n / B) micro batches of its own batch size B: the pass e of its uses in the order of
plan/whole.py, cut every B uses. The micro batches of all buckets are shuffled by (seed, e), and a step takes the next U of
them, whatever their buckets; the last step of an epoch takes those that are left. U is accumulation x devices, and that
product alone is known here: rank r of D takes micro batches r, r + D, ... of a step.

Fractions of repeats make epochs of different lengths. They come round after as many epochs as the least common multiple of
their denominators, so that a table of so many numbers makes every position arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from difftrain.config.spellings.spelling import option
from difftrain.contracts import DataFault
from difftrain.data.plan.plan import EVERY, EpochPlan, RankShare, Uses
from difftrain.data.plan.sequential import LruCache
from difftrain.data.plan.tables import BucketRows, PlanTables
from difftrain.data.plan.whole import RandomOrder

MOST_EPOCHS = 1 << 16  # until fractions of repeats come round


class EveryPlan(EpochPlan):
    """Serve every use in every epoch. batch_sizes: images of a micro batch, of each data set. unit: micro batches of a step."""

    kind = EVERY

    def __init__(self, tables: PlanTables, seed: int, batch_sizes: Sequence[int], unit: int) -> None:
        super().__init__(tables, seed, [size * unit for size in batch_sizes], "random")
        self.batch_sizes, self.unit = tuple(batch_sizes), unit
        self._batches = np.array([self.batch_sizes[rows.group] for rows in self.buckets], dtype=np.int64)
        self._order = RandomOrder(tables, seed, self._batches.tolist())
        self._epochs = LruCache(4)

        # steps before each epoch of a round: with whole repeats, whose epochs are alike, a round is one epoch
        period = math.lcm(*(repeats.period for repeats in self._repeats))
        if period > MOST_EPOCHS:
            raise DataFault(
                f"{option('data.epoch_batches', 'every')}: fractions of repeats come round after {period:,} epochs only, "
                f"more than {MOST_EPOCHS:,}: give them fewer digits, or {option('data.epoch_batches', 'whole')}"
            )
        micro_batches = np.zeros(period, dtype=np.int64)
        for repeats, batch in zip(self._repeats, self._batches.tolist(), strict=True):
            micro_batches += -(-repeats.uses_of_passes(period) // batch)
        self._before = np.append(0, np.cumsum(-(-micro_batches // unit)))
        self.per_epoch = Fraction(int(self._before[-1]), period)

    @property
    def _round(self) -> int:
        return len(self._before) - 1

    def steps_before(self, epoch: int) -> int:
        """Return how many steps of the data come before an epoch."""
        rounds, rest = divmod(epoch, self._round)
        return rounds * int(self._before[-1]) + int(self._before[rest])

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, index within it) of a step."""
        rounds, rest = divmod(self._position(step), int(self._before[-1]))
        epoch = int(np.searchsorted(self._before, rest, side="right")) - 1
        return rounds * self._round + epoch, rest - int(self._before[epoch])

    def micro_batches(self, epoch: int) -> np.ndarray:
        """Return how many micro batches each bucket has in an epoch."""
        return self._epoch(epoch)[1]

    def counts(self, step: int) -> list[tuple[BucketRows, int]]:
        """Return how many draws of which buckets a global batch has; a bucket may come more than once."""
        epoch, index = self.locate(step)
        first, after = index * self.unit, (index + 1) * self.unit
        which, starts, stops = self._spans(epoch, np.arange(first, min(after, self._total(epoch))))
        return [(self.buckets[b], stop - start) for b, start, stop in zip(which, starts, stops, strict=True)]

    def parts(self, step: int) -> list[Uses]:
        """Return the micro batches of a global batch."""
        epoch, index = self.locate(step)
        first, after = index * self.unit, (index + 1) * self.unit
        return self._uses(epoch, np.arange(first, min(after, self._total(epoch))))

    def micro_batch(self, step: int, number: int, share: RankShare) -> Uses | None:
        """Return a rank's micro batch; where others have one of this number and it has none, one draw of theirs, idle."""
        if share.accumulation * share.dp_size != self.unit:
            raise ValueError(f"steps of {self.unit} micro batches for {share}")
        epoch, index = self.locate(step)
        total = self._total(epoch)
        first = index * self.unit + number * share.dp_size
        if first >= total:
            return None
        own = first + share.dp_rank
        if own < total:
            return self._uses(epoch, np.array([own]))[0]
        return self._uses(epoch, np.array([first]))[0].part(slice(0, 1))._replace(idle=True)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the uses of each bucket in an epoch, and its micro batches."""

        def counted() -> tuple[np.ndarray, np.ndarray]:
            uses = np.array([repeats.uses(epoch) for repeats in self._repeats], dtype=np.int64)
            return uses, -(-uses // self._batches)

        return self._epochs.get(epoch % self._round, counted)

    def _total(self, epoch: int) -> int:
        return int(self.micro_batches(epoch).sum())

    def _spans(self, epoch: int, places: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """Return the bucket of each place in an epoch's order of micro batches, and from where to where in its pass it goes."""
        uses, counts = self._epoch(epoch)
        slots = self._order.epoch(epoch, int(counts.sum()))(places)
        ends = np.cumsum(counts)
        buckets = np.searchsorted(ends, slots, side="right")
        starts = (slots - ends[buckets] + counts[buckets]) * self._batches[buckets]
        stops = np.minimum(starts + self._batches[buckets], uses[buckets])
        return buckets.tolist(), starts.tolist(), stops.tolist()

    def _uses(self, epoch: int, places: np.ndarray) -> list[Uses]:
        return [
            Uses(self.buckets[bucket], *self._order.rows(bucket, epoch, np.arange(start, stop)))
            for bucket, start, stop in zip(*self._spans(epoch, places), strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        """Return what the digest stands for."""
        sizes = self.batch_sizes[0] if len(self.batch_sizes) == 1 else list(self.batch_sizes)
        return self._described({"order": self.order, "epoch_batches": EVERY, "micro_batch": sizes})

    def lines(self) -> list[str]:
        """Say how steps and epochs come about."""
        buckets, sizes = len(self.buckets), ", ".join(map(str, self.batch_sizes))
        smaller = int(np.count_nonzero(self._epoch(0)[0] % self._batches))
        return [
            f"{self.uses} samples an epoch (repeats counted) in {buckets} bucket{'s'[: buckets > 1]}, all in every epoch: "
            f"{self._total(0)} micro batches of {sizes}{' by data set' if len(self.batch_sizes) > 1 else ''} in the first, "
            f"{smaller} of them smaller, {self.unit} a step: {self.steps(0)} steps in the first epoch, "
            f"{float(self.per_epoch):.2f} on average"
        ]
