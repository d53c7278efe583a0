"""Everything one run holds, put together once and passed to the loop and its hooks; and its counters, part of every checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.contracts import Batch, Bucket, Engine, Family, Parts, Reject
from difftrain.hub.uploads import Uploads

if TYPE_CHECKING:
    from difftrain.checkpoint import Claim
    from difftrain.config import TrainConfig
    from difftrain.config.schema.sections import EvalSetSection
    from difftrain.data.plan.plan import EpochPlan
    from difftrain.data.prepare import Data
    from difftrain.device import Device
    from difftrain.diffusion.ema import Ema, PowerEma
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock


PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class EvaluationSet:
    """One evaluation set, opened. data: read its cache, where there is one. cfg: the run's with this set's data."""

    section: EvalSetSection
    cfg: TrainConfig
    data: Data
    rejects: tuple[Reject, ...]

    @property
    def name(self) -> str:
        """Return what its numbers are called by."""
        return self.section.name


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


@dataclass
class Run:
    """Hold the parts of one run. The loop owns progress; nobody else writes it."""

    cfg: TrainConfig  # resolved: the seed is a number
    argv: list[str]
    device: Device
    ranks: Ranks
    family: Family
    parts: Parts
    engine: Engine
    data: Data
    plan: EpochPlan
    total_steps: int
    global_batch: int  # of data sets with several sizes, the largest
    clock: Clock
    claim: Claim  # on the output folder
    ema: Ema | None = None
    profiles: list[PowerEma] = field(default_factory=list)  # averages by relative width
    progress: TrainProgress = field(default_factory=TrainProgress)
    uploads: Uploads = field(default_factory=Uploads)
    choices: list[str] = field(default_factory=list)  # made automatically, with their reasons
    begins_at: int = 0  # the first step of a fresh run
    sets: tuple[EvaluationSet, ...] = ()

    # what checkpoints, exports and reports say of the run
    identity: dict[str, Any] = field(default_factory=dict)  # as JSON, the head of every checkpoint's meta
    hub: dict[str, str] = field(default_factory=dict)  # commits of what was fetched
    schedule_from: int = 0  # updates done when the schedule of the learning rate began
    attention: str = ""  # which one, in a sentence
    parameters: dict[str, int] = field(default_factory=dict)  # by part, before an engine cuts them into pieces
    started_at: float = 0.0
    session_id: str = ""  # kohya's: another one for every start

    # what the session has met with so far
    kernels: dict[str, Any] = field(default_factory=dict)  # calls counted in its first step
    memory: str = ""  # what weights, gradients and optimizer take, in a sentence
    failed_saves: int = 0
    not_finite: str = ""  # which exported weights are not, in a sentence
    snapshots_at: int | None = None  # the step that the last snapshots of averages are of
    _flops: dict[Bucket, float] = field(default_factory=dict)

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

    def flops(self, micro: list[Batch]) -> float:
        """Return the model FLOPs of an image in the bucket of these micro batches."""
        bucket = micro[0].bucket
        if bucket not in self._flops:
            self._flops[bucket] = self.family.flops_per_sample(self.parts, bucket)
        return self._flops[bucket]

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


class Hook(Protocol):
    """Act between steps; every rank calls every hook at the same step."""

    def before_training(self, run: Run) -> None: ...
    def after_step(self, run: Run) -> None: ...
    def after_training(self, run: Run) -> None: ...
