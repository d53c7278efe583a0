"""What is known of the steps: losses, read from the device only where a line is due; memory and kernels of the first one."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from difftrain.cache.request import bytes_text
from difftrain.config.spellings.spelling import option
from difftrain.contracts import METRIC, Batch, Reject, Stats, TrainingFault
from difftrain.device import AttentionCalls, counting
from difftrain.engine.half_precision import weights_kept
from difftrain.report.line import AverageLoss, StepMetrics
from difftrain.train.state import Position, TrainedModel, TrainProgress

if TYPE_CHECKING:
    from difftrain.config import TrainConfig
    from difftrain.config.schema.sections import OptimizerSection, TrainingSection
    from difftrain.contracts import Engine, Parts
    from difftrain.data.index.index import Index
    from difftrain.data.plan.plan import EpochPlan
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock
    from difftrain.train.outputs import RunOutputs


log = logging.getLogger("difftrain")


def memory_sentence(training: TrainingSection, parts: Parts, engine: Engine) -> str:
    """Say what weights, gradients and optimizer state take, in what precision, activations aside."""
    trained = [parameter for parameter in parts.root.parameters() if parameter.requires_grad]
    names = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
    kept = [parameter for parameter in parts.root.parameters() if not parameter.requires_grad]
    frozen = _bytes(kept) + _bytes(parameter for part in parts.frozen.values() for parameter in part.parameters())
    weights, state = _bytes(trained), _bytes(_tensors(getattr(getattr(engine, "optimizer", None), "state", {})))
    beside = weights_kept(training) if training.full_precision else ""
    masters = f", {beside} master weights" if beside not in ("", "none") else ""
    return (
        f"memory: trained weights {bytes_text(weights)} in {' and '.join(names)}{masters}, as much for gradients, "
        f"optimizer state {bytes_text(state)}; frozen weights {bytes_text(frozen)}; plus activations"
    )


def checkpoint_bytes(model: TrainedModel) -> int:
    """Return about how large a checkpoint will be: weights in fp32, optimizer state, averages; 0 where that is not known."""
    trained = [parameter for parameter in model.parts.root.parameters() if parameter.requires_grad]
    weights = sum(parameter.numel() for parameter in trained) * 4
    averages = (model.averages.ema is not None) + len(model.averages.profiles)
    return weights * (1 + averages) + _bytes(_tensors(getattr(getattr(model.engine, "optimizer", None), "state", {})))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Count what is here: of a tensor that is sharded over ranks this one's rows."""
    here = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in here if tensor.device != torch.device("meta"))


@dataclass(frozen=True)
class Pending:
    """Hold one step whose numbers are still on the device."""

    step: int  # counted from 1
    stats: Stats


class Meter:
    """Collect the steps' numbers, read them every log_every steps, judge them, and hand them to the outputs."""

    def __init__(
        self,
        cfg: TrainConfig,
        progress: TrainProgress,
        plan: EpochPlan,
        index: Index,
        device: Device,
        ranks: Ranks,
        clock: Clock,
        outputs: RunOutputs,
        origin: Callable[..., str] | None = None,
    ) -> None:
        """Begin. origin: tells of a step that was skipped which module was the first whose values were not finite."""
        self._origin = origin
        self._cfg, self._progress, self._plan, self._index = cfg, progress, plan, index
        self._device, self._ranks, self._clock, self._outputs = device, ranks, clock, outputs

        # steps whose numbers are still to be read, and what is known of the session
        self._average = AverageLoss()
        self._average.load(progress.losses)
        self._pending: list[Pending] = []
        self._rejects: list[Reject] = []
        self.bad_losses = 0  # in a row, up to now and in this session: losses that are no number
        self._measures: dict[str, float] = {}  # of the latest step that was read
        self._memory = ""  # what weights, gradients and optimizer take, once it is said
        self.kernels: dict[str, Any] = {}  # calls counted in the first step of the session
        self.last: StepMetrics | None = None

    @contextlib.contextmanager
    def counted(self, micro: list[Batch]) -> Iterator[None]:
        """Count what runs inside, the first time in a session: kept for the report, and said once."""
        if self.kernels:
            yield
            return
        with counting() as counted_operators:
            yield
        calls, step = AttentionCalls.of(counted_operators), self._progress.step + 1
        others = {kind: number for kind, number in sorted(counted_operators.items()) if not AttentionCalls.counts(kind)}
        self.kernels = {"step": step, "micro_batches": len(micro), "attention": calls.record(), "others": others}
        beside = "; compiled blocks are not counted" if self._cfg.training.compile else ""
        log.info("attention in step %d: %s%s", step, calls.sentence(), beside)

    def say_memory(self, parts: Parts, engine: Engine) -> None:
        """Say it once a session, behind the first update, when the optimizer has its state."""
        if not self._memory:
            self._memory = memory_sentence(self._cfg.training, parts, engine)
            log.info("%s", self._memory)

    def after_step(self, at: Position, micro: list[Batch], stats: Stats) -> None:
        """Take a step's numbers; read them where a line is due."""
        self._pending.append(Pending(at.step, stats))
        self._rejects += [reject for batch in micro for reject in batch.rejects]
        self._outputs.advance(at.step, at.samples_seen)
        if at.step % self._cfg.logging.log_every == 0 or not at.steps_left:
            self.flush()
            self._write_line(last=not at.steps_left)

    def flush(self) -> None:
        """Read the pending steps from the device (the host waits) and put the counters right. Every rank calls it."""
        if self._pending:
            table = torch.stack(
                [torch.stack([p.stats.sums["loss"], p.stats.grad_norm, p.stats.skipped]).float() for p in self._pending]
            ).tolist()
            for row_index, (pending, (loss, grad_norm, skipped)) in enumerate(zip(self._pending, table)):
                origin = self._origin_of(pending.step, [bool(row[2]) for row in table[row_index:]]) if skipped else ""
                self._judge(pending.step, loss, grad_norm, bool(skipped), origin)
            self._latest = (self._pending[-1], *table[-1])
            self._measures = measured(self._pending[-1].stats)
            self._pending.clear()
        self._hand_on_rejects()

    def update_progress(self) -> TrainProgress:
        """Bring the counters up to date for a checkpoint, and return them. Every rank calls it."""
        self.flush()
        self._outputs.flush()
        self._progress.losses = self._average.state()
        return self._progress

    def _origin_of(self, step: int, skipped: list[bool]) -> str:
        """Say where a step's values were first not finite. skipped: of it and the steps done since."""
        if self._origin is None:
            return ""
        return self._origin(step, skipped=sum(skipped), updated=len(skipped) - sum(skipped))

    def _judge(self, step: int, loss: float, grad_norm: float, skipped: bool, origin: str = "") -> None:
        epoch, index = self._plan.locate(step - 1)
        self._average.add(index, loss)
        self.bad_losses = 0 if math.isfinite(loss) else self.bad_losses + 1
        if not skipped:
            self._progress.skipped_in_a_row = 0
            return

        # a step that was not applied is named with its records, one of which may be the cause
        self._progress.skipped += 1
        self._progress.skipped_in_a_row += 1
        parts = self._plan.parts(step - 1)
        draws = [draw for uses in parts for draw in self._plan.draws(uses)]
        names = [record.name for record in self._index.records([draw.record_id for draw in draws])]
        log.warning(
            "step %d (epoch %d, %s): loss %s, gradient norm %s; %s%s. Its records: %s",
            step,
            epoch + 1,
            ", ".join(dict.fromkeys(str(uses.bucket.bucket) for uses in parts)),
            loss,
            grad_norm,
            what_was_skipped(self._cfg.optimizer, loss),
            f"; {origin}" if origin else "",
            "; ".join(f"{name} [{draw.key.hex()} #{draw.occurrence}]" for name, draw in zip(names, draws)),
        )

        # one may be an accident, many in a row are not
        if self._progress.skipped_in_a_row >= self._cfg.training.max_skipped_steps:
            first = step - self._progress.skipped_in_a_row + 1
            weights = "" if is_fused(self._cfg.optimizer) else f"The weights are those of step {first - 1}. "
            raise TrainingFault(
                f"loss or gradient was not finite in {self._progress.skipped_in_a_row} steps in a row, {first} to {step}. "
                f"{weights}Lower {option('optimizer.learning_rate')}, or train in bf16 instead of fp16; "
                f"{option('training.max_skipped_steps')} says how many are tolerated"
            )

    def _hand_on_rejects(self) -> None:
        """Name items that failed only when they were decoded; ranks talk about it only where any has one."""
        if not self._ranks.any(bool(self._rejects)):
            return
        for rejects in self._ranks.gather(self._rejects):
            self._outputs.rejected(rejects)
        self._rejects = []

    def _write_line(self, *, last: bool) -> None:
        pending, loss, grad_norm, _ = self._latest
        span = self._clock.read()
        epoch, _ = self._plan.locate(pending.step - 1)
        lrs = pending.stats.lrs
        self.last = StepMetrics(
            step=pending.step,
            epoch=epoch + 1,
            step_loss=loss,
            avr_loss=self._average.value,
            lr=next(iter(lrs.values()), math.nan),
            grad_norm=grad_norm,
            fps=span.fps,
            compute_fps=span.compute_fps,
            data_wait_s=span.step_wait_s,
            peak_memory_gib=self._device.peak_memory_gib(exact=last),
            samples_seen=self._progress.samples_seen,
            step_s=span.step_s,
            lrs=lrs,
            d=None if pending.stats.adapted_lr is None else float(pending.stats.adapted_lr),
            measures=self._measures,
            skipped=self._progress.skipped,
            session=self._clock.total().sessions,
            elapsed_s=self._clock.session().e2e_s,
        )
        self._outputs.line(self.last)


def measured(stats: Stats) -> dict[str, float]:
    """Return what a step measured beside the loss, over all its ranks and micro batches; the host waits."""
    values = {name.removeprefix(METRIC): float(value) for name, value in stats.sums.items() if name.startswith(METRIC)}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def is_fused(section: OptimizerSection) -> bool:
    """Tell whether weights are updated while the backward pass runs."""
    return section.fused_backward or section.fused_groups is not None


def what_was_skipped(section: OptimizerSection, loss: float) -> str:
    """Say what a step that is not finite has left as it was: a bad gradient comes late for updates in the backward."""
    if is_fused(section) and math.isfinite(loss):
        return "what the backward pass updates from the first such gradient on was left as it is, on all ranks"
    return "the update was skipped on all ranks"
