"""Everything one run holds, put together once; its counters, part of every checkpoint; and what hooks are told of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.contracts import Bucket, Engine, Family, Parts, RunFacts
from difftrain.hub.uploads import Uploads
from difftrain.report.notices import Notices

if TYPE_CHECKING:
    from difftrain.checkpoint import Claim
    from difftrain.config import TrainConfig
    from difftrain.data.evaluation_sets import EvaluationSet
    from difftrain.data.plan.plan import EpochPlan
    from difftrain.data.prepare import Data
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock
    from difftrain.train.averages import Averages


PROGRESS_FILE = "progress.json"


@dataclass
class TrainProgress:
    """Count optimizer steps and images.

    step: updates done, 0 before the first. skipped_in_a_row: non-finite updates up to now, without a good one between.
    losses: state of the averaged loss, in the words of report/.
    """

    step: int = 0
    samples_seen: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    losses: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write progress.json into a checkpoint folder."""
        path = folder / PROGRESS_FILE
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def of(cls, text: str) -> TrainProgress:
        """Read what `write` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Position:
    """Where a run is between two steps, as its hooks are told.

    epoch: the number of the one that the last step was of, from 1. epoch_end: how many epochs are done where that step
    ended one. at_start: this is where a fresh run begins.
    """

    step: int
    samples_seen: int = 0
    steps_left: int = 0
    epoch: int = 1
    epoch_end: int | None = None
    at_start: bool = False


class Hook(Protocol):
    """Act between steps; every rank calls every hook at the same step."""

    def before_training(self, at: Position) -> None: ...
    def after_step(self, at: Position) -> None: ...


class Due:
    """Tell when something that recurs is due: after so many steps, epochs or examples, and at_end of the run."""

    def __init__(
        self,
        steps: int | None,
        epochs: int | None,
        examples: int | None = None,
        *,
        at_end: bool = True,
        from_first_epoch: bool = False,
    ) -> None:
        self._steps, self._epochs, self._examples, self._at_end = steps, epochs, examples, at_end
        self._ahead = 1 if from_first_epoch else 0
        self._seen = 0

    def begin(self, samples_seen: int) -> None:
        """Count examples from where the session begins."""
        self._seen = samples_seen

    def __call__(self, at: Position) -> bool:
        """Ask after every step, once."""
        seen, self._seen = self._seen, at.samples_seen
        if self._examples and seen // self._examples != self._seen // self._examples:
            return True
        if self._steps and at.step % self._steps == 0:
            return True
        if self._epochs and at.epoch_end and (at.epoch_end - self._ahead) % self._epochs == 0:
            return True
        return self._at_end and not at.steps_left


@dataclass(frozen=True)
class TrainedModel:
    """What is trained: its maths, its parts, the engine that holds the weights, and their averages."""

    family: Family
    parts: Parts
    engine: Engine
    averages: Averages


@dataclass
class Run:
    """Hold the parts of one run. The loop owns progress; nobody else writes it."""

    cfg: TrainConfig  # resolved: the seed is a number
    argv: list[str]
    device: Device
    ranks: Ranks
    model: TrainedModel
    data: Data
    plan: EpochPlan
    total_steps: int
    global_batch: int  # of data sets with several sizes, the largest
    clock: Clock
    claim: Claim  # on the output folder
    progress: TrainProgress = field(default_factory=TrainProgress)
    uploads: Uploads = field(default_factory=Uploads)
    notices: Notices = field(default_factory=Notices)
    choices: list[str] = field(default_factory=list)  # made automatically, with their reasons
    begins_at: int = 0  # the first step of a fresh run
    sets: tuple[EvaluationSet, ...] = ()  # the held-out part of the training set first, where there is one

    # what checkpoints, exports and reports say of the run
    identity: dict[str, Any] = field(default_factory=dict)  # as JSON, the head of every checkpoint's meta
    hub: dict[str, str] = field(default_factory=dict)  # commits of what was fetched
    slow_ranks: list[str] = field(default_factory=list)  # what was said of ranks that the others waited for
    schedule_from: int = 0  # updates done when the schedule of the learning rate began
    attention: str = ""  # which one, in a sentence
    parameters: dict[str, int] = field(default_factory=dict)  # by part, before an engine cuts them into pieces
    started_at: float = 0.0
    session_id: str = ""  # kohya's: another one for every start

    _flops: dict[Bucket, float] = field(default_factory=dict)

    def meta(self, kind: str) -> dict[str, object]:
        """Return what a checkpoint of a kind says of this run, as it is now."""
        step = self.progress.step
        position = {"epoch": self.plan.locate(step)[0], "data_offset": self.plan.offset}
        return {**self.identity, "step": step, "kind": kind, **position, "schedule_from": self.schedule_from}

    def facts(self) -> RunFacts:
        """Return what the header of an export says of this run, as it is now."""
        return RunFacts(
            step=self.progress.step,
            epoch=self.epoch,
            total_steps=self.total_steps,
            num_epochs=self.cfg.training.max_epochs or self.epoch_of(self.total_steps),
            global_batch=self.global_batch,
            started_at=self.started_at,
            session_id=self.session_id,
            data=self.data.summary(),
        )

    @property
    def out(self) -> Path:
        """Return the output folder."""
        return self.cfg.output_dir

    @property
    def name(self) -> str:
        """Return the name that files of this run start with, where they hold one."""
        return self.cfg.save.output_name

    @property
    def steps_left(self) -> int:
        """Return how many updates are still to do."""
        return self.total_steps - self.progress.step

    def flops(self, bucket: Bucket) -> float:
        """Return the model FLOPs of an image in a bucket."""
        if bucket not in self._flops:
            self._flops[bucket] = self.model.family.flops_per_sample(self.model.parts, bucket)
        return self._flops[bucket]

    @property
    def position(self) -> Position:
        """Return where the run is now."""
        progress, first = self.progress, self.progress.step == self.begins_at
        return Position(
            progress.step, progress.samples_seen, self.steps_left, self.epoch, self.epoch_end(), at_start=first
        )

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that the last step was of, from 1."""
        return self.epoch_of(self.progress.step)

    def epoch_of(self, steps: int) -> int:
        """Return the number of the epoch that the last of so many steps is of; the first's, where these data have none."""
        return self.plan.locate(max(steps - 1, -self.plan.offset))[0] + 1

    def epoch_end(self) -> int | None:
        """Return the number of epochs done where the last step ended one, else None.

        An epoch without a step (a data set smaller than a global batch) ends with the step before it.
        """
        step = self.progress.step
        if step + self.plan.offset == 0:  # no step of these data has been done
            return None
        epoch, _ = self.plan.locate(step - 1)
        after, _ = self.plan.locate(step)
        return after if after != epoch else None
