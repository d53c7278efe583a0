"""The epoch plan: which uses of which records form global batch k. A pure function, in closed form.

Every bucket is an endless stream: pass p is a keyed permutation of its uses (repeats counted), and epoch e owns
batches floor(e n / G) to floor((e + 1) n / G) of the stream. So nothing is dropped or padded, every use comes once a
pass, and any position is arithmetic. World size, workers and listing order appear nowhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import numpy as np

from difftrain.config import TrainingSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Bucket, DataFault, Draw
from difftrain.data.plan.sequential import BucketRepeats, LruCache, SequentialOrder, bucket_key
from difftrain.data.plan.tables import BucketRows, PlanTables, total_uses
from difftrain.diffusion.draws import STREAM_VERSION
from difftrain.diffusion.permutation import Permutation

ALL = slice(None)


class Uses(NamedTuple):
    """Draws of one bucket as rows of the tables."""

    bucket: BucketRows
    rows: np.ndarray
    occurrences: np.ndarray

    def part(self, which: slice) -> Uses:
        """Return some of them."""
        return Uses(self.bucket, self.rows[which], self.occurrences[which])


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

    def pick(self, epoch: int, index: int, counts: np.ndarray) -> tuple[int, int]:
        """Return (bucket, its k-th batch of this epoch) of the epoch's batch number `index`."""
        ends = np.cumsum(counts)
        total = int(ends[-1])
        order = self._permutations.get(("epoch", epoch), lambda: Permutation(total, self._seed, "epoch", epoch))
        slot = order(index)
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


class EpochPlan:
    """Say which draws form global batch k, for every k. Picklable; memory of the order of the buckets.

    global_batch: one number, or that of each data set; a batch is of one bucket, so of one data set.
    """

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
        if not tables.training:
            raise DataFault(
                f"no record is left to train on: all of them are held out for validation ({option('validation.split')})"
            )
        self.global_batches = (global_batch,) if isinstance(global_batch, int) else tuple(global_batch)
        if min(self.global_batches) < 1 or tables.layout != {"random": "key", "sequential": "shard"}[order]:
            raise ValueError(f"order {order!r} over tables by {tables.layout}, global batch {global_batch}")

        self.tables, self.seed, self.order = tables, seed, order
        self.offset = 0  # of the run's steps in the data: not 0 where a resume began an epoch anew
        self.buckets = tables.training

        # uses of each bucket a pass: the same in every one, or with fractions of repeats
        self._repeats = [BucketRepeats(rows) for rows in self.buckets]
        self._even_uses = np.array([0 if p.fractional else int(p.rate) for p in self._repeats], dtype=np.int64)
        self._fractional = [number for number, repeats in enumerate(self._repeats) if repeats.fractional]
        batches = [self.global_batches[rows.dataset] for rows in self.buckets]
        self._batches = np.array(batches, dtype=np.int64)

        # batches an epoch on average, as the fraction share / per
        self._per = math.lcm(*batches)
        shares = (repeats.rate * (self._per // batch) for repeats, batch in zip(self._repeats, batches, strict=True))
        share = sum(shares, Fraction(0))
        self._share = share.numerator if share.denominator == 1 else share
        self._uneven = sum(repeats.fractional for repeats in self._repeats)

        # how batches follow one another
        self._settings: dict[str, Any] = {"order": order}
        self.arrangement: BatchOrder
        if order == "sequential":
            self._settings |= {"streams": streams, "window": window}
            self.arrangement = SequentialOrder(tables, seed, batches, streams, window)
        else:
            self.arrangement = RandomOrder(tables, seed, batches)

    @property
    def uses(self) -> int | float:
        """Return how many draws an epoch has on average, repeats counted."""
        return total_uses(self.buckets)

    @property
    def mean_batch(self) -> float:
        """Return how many draws a step has on average."""
        return float(sum((repeats.rate for repeats in self._repeats), Fraction(0)) * self._per / self._share)

    @property
    def starved(self) -> list[BucketRows]:
        """Return the buckets that are smaller than the global batch: they are served every few epochs."""
        return [rows for rows in self.buckets if rows.uses < self.global_batches[rows.dataset]]

    def served(self, epoch: int) -> np.ndarray:
        """Return how many batches of each bucket come before an epoch."""
        # uses of full passes over batch size: what is left over begins the next epoch's first batch
        uses = epoch * self._even_uses
        for bucket in self._fractional:
            uses[bucket] = self._repeats[bucket].before(epoch)
        return uses // self._batches

    def total_steps(self, epochs: int) -> int:
        """Return how many steps the first `epochs` epochs have: also the first step of epoch number `epochs`."""
        return int(self.served(epochs).sum()) - self.offset

    def begin_epoch_at(self, epoch: int, step: int) -> None:
        """Let an epoch begin at a step of the run, wherever in the data that step was."""
        self.offset += self.total_steps(epoch) - step

    def steps(self, epoch: int) -> int:
        """Return the number of global batches of an epoch; it varies by at most the number of buckets."""
        return self.total_steps(epoch + 1) - self.total_steps(epoch)

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, index within it) of a step."""
        position = step + self.offset
        if position < 0:
            raise IndexError(f"step {step} is below {-self.offset}")
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

    def dataset(self, step: int) -> int:
        """Return the data set that a global batch is of."""
        if len(self.global_batches) == 1:
            return 0
        epoch, index = self.locate(step)
        bucket, _ = self.arrangement.pick(epoch, index, self.served(epoch + 1) - self.served(epoch))
        return self.buckets[bucket].dataset

    def size(self, step: int) -> int:
        """Return the number of draws of a global batch."""
        return self.global_batches[self.dataset(step)]

    def batch(self, step: int, part: slice = ALL) -> tuple[Bucket, list[Draw]]:
        """Return bucket and draws of global batch `step`; rank r takes part = slice(r, None, dp_size)."""
        uses = self.uses_of(step, part)
        return uses.bucket.bucket, self.draws(uses.rows, uses.occurrences)

    def draws(self, rows: np.ndarray, occurrences: np.ndarray) -> list[Draw]:
        """Name the records of rows."""
        ids, keys = self.tables.take(rows)
        return list(map(Draw, ids, keys, occurrences.tolist()))

    @property
    def digest(self) -> str:
        """Hash all that decides the draws. In checkpoints: a resumed run must find the same."""
        return hashlib.blake2b(json.dumps(self.describe(), sort_keys=True).encode(), digest_size=16).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return what the digest stands for, readable, as JSON takes it; `changes` compares two of them."""
        return {
            "stream_version": STREAM_VERSION,
            "seed": self.seed,
            "global_batch": self.global_batches[0] if self._single else list(self.global_batches),
            **self._settings,
            "records": sum(rows.records for rows in self.buckets),
            # by name and not in order, so that a checkpoint tells which bucket changed
            "buckets": {
                self.tables.name(rows): {"records": rows.records, "uses": rows.uses, "digest": rows.digest}
                for rows in self.buckets
            },
        }

    @property
    def _single(self) -> bool:
        return len(self.global_batches) == 1

    def lines(self) -> list[str]:
        """Say how steps and epochs come about, and which buckets starve."""
        buckets, batch = len(self.buckets), ", ".join(map(str, self.global_batches))
        lines = [
            f"{self.uses} samples an epoch (repeats counted) in {buckets} bucket{'s'[: buckets > 1]}, "
            f"global batch {batch}{'' if self._single else ' by data set'}: "
            f"{self.steps(0)} steps in the first epoch, {float(self._share / self._per):.2f} on average"
        ]
        for rows in self.starved:
            needed = self.global_batches[rows.dataset]
            lines.append(
                f"bucket {self.tables.name(rows)} has {rows.uses} samples an epoch, fewer than the global batch {needed}: "
                f"used about every {needed / rows.uses:.1f} epochs, nothing dropped"
            )
        return lines


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say in words how two plans differ, from `describe()` of each. Empty where they are the same."""
    words = {"global_batch": "global batch", "records": "record count", "stream_version": "stream version"}
    differences = [
        f"{words.get(name, name)} {before.get(name)} -> {now.get(name)}"
        for name in dict.fromkeys([*before, *now])
        if name != "buckets" and before.get(name) != now.get(name)
    ]
    old, new = before.get("buckets", {}), now.get("buckets", {})
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            differences.append(f"bucket {name} {'is new' if a is None else 'is gone'}")
        elif (a["records"], a["uses"]) != (b["records"], b["uses"]):
            differences.append(
                f"bucket {name}: {a['records']} -> {b['records']} records, {a['uses']} -> {b['uses']} uses"
            )
        elif a["digest"] != b["digest"]:
            differences.append(f"bucket {name}: as many records as before, but different ones (or renamed)")
    return differences


# --- How long a run is: by epochs, by steps, or by what comes first


def why(training: TrainingSection, plan: EpochPlan) -> str:
    """Say what ends the run."""
    if not training.max_epochs:
        return f"by {option('training.max_steps')}"
    epochs = f"{training.max_epochs} epoch{'s' if training.max_epochs > 1 else ''}"
    if not training.first_limit:
        return f"by {option('training.max_epochs')}={training.max_epochs}"
    steps = plan.total_steps(training.max_epochs)
    if steps <= training.max_steps:
        return f"by {epochs}, which are before the {training.max_steps} steps of max_steps"
    return f"by max_steps, which is before the {steps} steps of {epochs}"


def total_steps(training: TrainingSection, plan: EpochPlan) -> int:
    """Return the steps of the whole run; epochs win over steps, unless what comes first is asked for."""
    if not training.max_epochs:
        return training.max_steps
    steps = plan.total_steps(training.max_epochs)
    return min(steps, training.max_steps) if training.first_limit else steps
