"""Everything one run holds, put together once and passed to the loop and its hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.contracts import Batch, Bucket, Engine, Family, Parts
from difftrain.train.hub.uploads import Uploads
from difftrain.train.progress import Progress

if TYPE_CHECKING:
    from difftrain.checkpoint import Claim
    from difftrain.config import TrainConfig
    from difftrain.data.plan import EpochPlan
    from difftrain.data.prepare import Data
    from difftrain.device import Device
    from difftrain.diffusion.ema import Ema
    from difftrain.diffusion.power_ema import PowerEma
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock
    from difftrain.train.evaluating_sets import EvaluationSet
    from difftrain.train.meter import Meter


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
    progress: Progress = field(default_factory=Progress)
    uploads: Uploads = field(default_factory=Uploads)
    facts: dict[str, Any] = field(default_factory=dict)  # what report.json wants beyond the numbers
    choices: list[str] = field(default_factory=list)  # made automatically, with their reasons
    begins_at: int = 0  # the first step of a fresh run
    sets: tuple[EvaluationSet, ...] = ()
    _meter: Meter | None = None
    _flops: dict[Bucket, float] = field(default_factory=dict)

    @property
    def meter(self) -> Meter:
        """Return the meter, which needs the run to be made."""
        assert self._meter is not None
        return self._meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        self._meter = meter

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
