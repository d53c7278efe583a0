"""The epoch plan: which uses of which records form global batch k. A pure function, in closed form.

Two kinds: plan/whole.py, whose steps are whole global batches of one bucket, and plan/every.py, whose epochs use every
record, as kohya's. World size, workers and listing order appear in neither.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np

from difftrain.config import TrainingSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import DataFault, Draw, Fault
from difftrain.data.plan.sequential import BucketRepeats
from difftrain.data.plan.tables import BucketRows, PlanTables, total_uses
from difftrain.diffusion.draws import STREAM_VERSION


class Uses(NamedTuple):
    """Draws of one bucket as rows of the tables.

    idle: they are another rank's. A rank that has no micro batch where others have one makes theirs too, for nothing:
    forward and backward take all ranks together.
    """

    bucket: BucketRows
    rows: np.ndarray
    occurrences: np.ndarray
    idle: bool = False

    def part(self, which: slice) -> Uses:
        """Return some of them."""
        return self._replace(rows=self.rows[which], occurrences=self.occurrences[which])


@dataclass(frozen=True)
class RankShare:
    """Which rank of how many it is, and what a rank takes at once. batch_sizes: images of a micro batch, of each data set."""

    dp_rank: int
    dp_size: int
    batch_sizes: tuple[int, ...]
    accumulation: int = 1

    @property
    def global_batches(self) -> tuple[int, ...]:
        """Return the draws of a full step over all ranks, of each data set."""
        return tuple(size * self.accumulation * self.dp_size for size in self.batch_sizes)

    def part(self, micro: int, group: int = 0) -> slice:
        """Return where micro batch `micro` lies in a whole global batch of a group: rank, rank + dp_size, ..."""
        span = self.dp_size * self.batch_sizes[group]
        return slice(self.dp_rank + micro * span, (micro + 1) * span, self.dp_size)


class EpochPlan(ABC):
    """Say which draws form global batch k, for every k. Picklable; memory of the order of the buckets.

    global_batches: the draws of a full step, of each data set. per_epoch: steps of an epoch on average; a kind of plan
    sets it.
    """

    kind: ClassVar[str]
    per_epoch: Fraction

    def __init__(self, tables: PlanTables, seed: int, global_batches: Sequence[int], order: str) -> None:
        if not tables.training:
            raise DataFault(
                f"no record is left to train on: all of them are held out for validation ({option('validation.split')})"
            )
        self.global_batches = tuple(global_batches)
        if min(self.global_batches) < 1 or tables.layout != {"random": "key", "sequential": "shard"}[order]:
            raise ValueError(f"order {order!r} over tables by {tables.layout}, global batch {self.global_batches}")
        self.tables, self.seed, self.order = tables, seed, order
        self.offset = 0  # of the run's steps in the data: not 0 where a resume began an epoch anew
        self.buckets = tables.training
        self._repeats = [BucketRepeats(rows) for rows in self.buckets]

    # ------------------------------------------------------------------ what a kind of plan says

    @abstractmethod
    def steps_before(self, epoch: int) -> int:
        """Return how many steps of the data come before an epoch."""

    @abstractmethod
    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, index within it) of a step. Raises IndexError before the first."""

    @abstractmethod
    def counts(self, step: int) -> list[tuple[BucketRows, int]]:
        """Return how many draws of which buckets a global batch has."""

    @abstractmethod
    def parts(self, step: int) -> list[Uses]:
        """Return the draws of a global batch, each part of one bucket."""

    @abstractmethod
    def micro_batch(self, step: int, number: int, share: RankShare) -> Uses | None:
        """Return a rank's micro batch of a step; None where no rank has one of that number. A rank computes its own only."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what the digest stands for, readable, as JSON takes it; `changes` compares two of them."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Say how steps and epochs come about."""

    # ------------------------------------------------------------------ what follows from that

    @property
    def uses(self) -> int | float:
        """Return how many draws an epoch has on average, repeats counted."""
        return total_uses(self.buckets)

    @property
    def mean_batch(self) -> float:
        """Return how many draws a step has on average."""
        return float(sum((repeats.rate for repeats in self._repeats), Fraction(0)) / self.per_epoch)

    @property
    def starved(self) -> list[BucketRows]:
        """Return the buckets that are not served in every epoch."""
        return []

    def size(self, step: int) -> int:
        """Return the number of draws of a global batch."""
        return sum(number for _, number in self.counts(step))

    def total_steps(self, epochs: int) -> int:
        """Return how many steps the first `epochs` epochs have: also the first step of epoch number `epochs`."""
        return self.steps_before(epochs) - self.offset

    def steps(self, epoch: int) -> int:
        """Return the number of global batches of an epoch."""
        return self.total_steps(epoch + 1) - self.total_steps(epoch)

    def begin_epoch_at(self, epoch: int, step: int) -> None:
        """Let an epoch begin at a step of the run, wherever in the data that step was."""
        self.offset += self.total_steps(epoch) - step

    def draws(self, uses: Uses) -> list[Draw]:
        """Name the records of rows."""
        ids, keys = self.tables.take(uses.rows)
        return list(map(Draw, ids, keys, uses.occurrences.tolist()))

    @property
    def digest(self) -> str:
        """Hash all that decides the draws. In checkpoints: a resumed run must find the same."""
        return hashlib.blake2b(json.dumps(self.describe(), sort_keys=True).encode(), digest_size=16).hexdigest()

    def _position(self, step: int) -> int:
        """Return the place of a step of the run in the data. Raises IndexError before the first."""
        position = step + self.offset
        if position < 0:
            raise IndexError(f"step {step} is below {-self.offset}")
        return position

    def _described(self, settings: dict[str, Any]) -> dict[str, Any]:
        several = len(self.global_batches) > 1
        return {
            "stream_version": STREAM_VERSION,
            "seed": self.seed,
            "global_batch": list(self.global_batches) if several else self.global_batches[0],
            **settings,
            "records": sum(rows.records for rows in self.buckets),
            # by name and not in order, so that a checkpoint tells which bucket changed
            "buckets": {
                self.tables.name(rows): {"records": rows.records, "uses": rows.uses, "digest": rows.digest}
                for rows in self.buckets
            },
        }


WHOLE_BATCHES, EVERY = "whole", "every"


def kind_of(described: dict[str, Any]) -> str:
    """Return the kind of plan that `describe` was of; version 0.5 knew whole batches alone."""
    return str(described.get("epoch_batches", WHOLE_BATCHES))


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say in words how two plans differ, from `describe()` of each. Empty where they are the same."""
    words = {
        "global_batch": "global batch",
        "micro_batch": "micro batch",
        "epoch_batches": "batches of an epoch",
        "records": "record count",
        "stream_version": "stream version",
    }
    before, now = ({"epoch_batches": kind_of(described), **described} for described in (before, now))
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


def why_no_step(training: TrainingSection, plan: EpochPlan) -> Fault:
    """Say by which arithmetic a run has no step at all."""
    largest = max(plan.buckets, key=lambda rows: rows.uses / plan.global_batches[rows.group])
    batch, epochs = plan.global_batches[largest.group], training.max_epochs or 0
    number = len(plan.buckets)
    buckets = f"{number} buckets, at most {largest.uses} in one" if number > 1 else "one bucket"
    what = f"no step in {epochs} epoch{'s'[: epochs != 1]}: {plan.uses} samples an epoch in {buckets}"
    remedy = f"train for longer than {training.max_epochs} epochs"
    if plan.kind == WHOLE_BATCHES:
        what += f", and a step takes {batch} of one bucket"
        remedy = f"a smaller batch, more epochs, or {option('data.epoch_batches', EVERY)}, which takes what there is"
    return Fault(f"{option('training.max_epochs')}={epochs}", what, remedy)
