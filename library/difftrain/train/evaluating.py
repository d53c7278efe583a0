"""Evaluation sets during training: the held-out part of the training set as training draws timesteps, others at quantiles.

The held-out set is measured under averaged weights, a line each time in validation.jsonl, and at quantiles for the report.
Sets with data of their own are measured at nine quantiles of the noise, under the raw weights and averaged, and by
pictures drawn for their captions: a line each time in evaluation.jsonl.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from difftrain.cache.build import with_cache
from difftrain.config import TrainConfig
from difftrain.config.schema.sections import EvalSetSection
from difftrain.contracts import Batch, DataFault, Family, Parts
from difftrain.data.evaluation_sets import EvaluationSet, common_records, open_set
from difftrain.data.loader import check_sizes
from difftrain.device.memory import EVALUATING, during
from difftrain.distributed.collective import on_each_machine
from difftrain.evaluation import quantile_losses, validate
from difftrain.report.metrics import EVALUATION, VALIDATION
from difftrain.train.state import Due, Position, TrainedModel

if TYPE_CHECKING:
    from difftrain.data.index.index import Index
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock
    from difftrain.train.kid import DrawnPictures
    from difftrain.train.outputs import RunOutputs

log = logging.getLogger("difftrain")


def open_sets(
    cfg: TrainConfig, device: Device, ranks: Ranks, family: Family, parts: Parts
) -> tuple[EvaluationSet, ...]:
    """Index every set with data of its own, and build its cache beside the training set's. Every rank calls it.

    Raises what preparing and caching the training set does.
    """
    return tuple(_opened(cfg, section, device, ranks, family, parts) for section in cfg.eval.sets)


def _opened(
    cfg: TrainConfig, section: EvalSetSection, device: Device, ranks: Ranks, family: Family, parts: Parts
) -> EvaluationSet:
    name = f"evaluation set {section.name}"

    def opened() -> EvaluationSet:
        try:
            return open_set(cfg, section, lambda line: log.info("%s: %s", name, line))
        except DataFault as fault:
            raise DataFault(f"{name}: {fault}") from fault

    opened_set = on_each_machine(ranks, opened)
    check_sizes(opened_set.data.tables, family.features)
    cached = with_cache(opened_set.cfg, device, ranks, family, parts, opened_set.data, trains=False)
    return replace(opened_set, data=cached.data, rejects=(*opened_set.data.rejects(), *cached.rejects))


def warn_of_trained(sets: tuple[EvaluationSet, ...], index: Index) -> None:
    """Warn where a set with data of its own shows pictures that are trained on. index: of the training set."""
    for eval_set in sets:
        if not eval_set.held_out and (common := common_records(index, eval_set.data.index)):
            what = "evaluation set %s: %d of its %d records have images that are also trained on"
            log.warning(what, eval_set.name, common, eval_set.data.index.count)


class Evaluating:
    """Measure every evaluation set where it is due, and leave a line a step in the file of its kind."""

    def __init__(
        self,
        sets: tuple[EvaluationSet, ...],
        model: TrainedModel,
        device: Device,
        ranks: Ranks,
        clock: Clock,
        outputs: RunOutputs,
        pictures: DrawnPictures | None = None,
    ) -> None:
        self._sets, self._model, self._device, self._ranks = sets, model, device, ranks
        self._clock, self._outputs, self._pictures = clock, outputs, pictures
        self._tokenize = model.family.tokenizer(model.parts) if sets else None
        self._due = [due_of(eval_set) for eval_set in sets]

    def before_training(self, at: Position) -> None:
        """Measure the weights at the start of a fresh run, where asked for."""
        for due in self._due:
            due.begin(at.samples_seen)
        first = [
            at.at_start and not eval_set.held_out and eval_set.cfg.eval.before_first_step for eval_set in self._sets
        ]
        self._measure(at, losses=first, pictures=first)

    def after_step(self, at: Position) -> None:
        """Measure where it is due."""
        losses = [due(at) for due in self._due]
        pictures = list(losses)
        for index, eval_set in enumerate(self._sets):
            if every := eval_set.cfg.eval.kid_every_n_steps:
                pictures[index] = at.step % every == 0 or not at.steps_left
        self._measure(at, losses, pictures)

    def quantiles(self) -> list[dict[str, Any]]:
        """Return the held-out loss at nine quantiles of the timestep, for the report; nothing without such records."""
        rows: list[dict[str, Any]] = []
        for eval_set in self._sets:
            if eval_set.held_out:
                with self._clock.paused("evaluation"), during(EVALUATING), self._model.averages.averaged():
                    rows += self._at_quantiles(eval_set)
        return rows

    def _measure(self, at: Position, losses: list[bool], pictures: list[bool]) -> None:
        """Measure sets in their order, the losses of some and the pictures of some; one line for each kind of them."""
        lines: dict[str, dict[str, Any]] = {}
        for eval_set, loss, picture in zip(self._sets, losses, pictures, strict=True):
            drawn = self._pictures if picture and not eval_set.held_out else None
            if not loss and drawn is None:
                continue
            head = {} if eval_set.held_out else {"epoch": at.epoch if at.step else 0, "samples_seen": at.samples_seen}
            line = lines.setdefault(VALIDATION if eval_set.held_out else EVALUATION, {"step": at.step, **head})
            if loss:
                with self._clock.paused("evaluation"), during(EVALUATING):
                    line |= (
                        self._as_drawn(eval_set, at.step) if eval_set.held_out else self._compared(eval_set, at.step)
                    )
            if drawn is not None:
                line |= drawn.measure(eval_set, at.step)
        for file, line in lines.items():
            self._outputs.evaluated(file, line)

    # --- what is measured of a set: by its rule

    def _as_drawn(self, eval_set: EvaluationSet, step: int) -> dict[str, Any]:
        """Return the mean loss under averaged weights, at the timesteps that training would draw."""
        with self._model.averages.averaged():
            result = validate(self._model.engine, self._batches(eval_set), gather=self._gather)
        log.info("validation at step %d: loss %.6f over %d records", step, result.loss, result.samples)
        return result.record()

    def _compared(self, eval_set: EvaluationSet, step: int) -> dict[str, Any]:
        """Return the losses at each quantile, and their mean, under the raw weights and averaged."""
        line: dict[str, Any] = {}
        for prefix, weights in self._model.averages.looks():
            with weights:
                rows = self._at_quantiles(eval_set)
            line |= {f"{eval_set.name}/samples": rows[0]["samples"]} | tags(eval_set.name, prefix, rows)
            log.info(
                "evaluation of %s at step %d, %s: loss %.6f over %d records; at 0.1 ... 0.9: %s",
                eval_set.name,
                step,
                "averaged weights" if prefix else "raw weights",
                line[f"{eval_set.name}/{prefix}loss"],
                rows[0]["samples"],
                " ".join(f"{row['loss']:.4f}" for row in rows),
            )
        return line

    def _at_quantiles(self, eval_set: EvaluationSet) -> list[dict[str, Any]]:
        draws = self._model.family.features.draws
        return quantile_losses(self._model.engine, self._batches(eval_set), draws, gather=self._gather)

    def _gather(self, value: Any) -> list[Any]:
        """Return every replica's value: its other ranks, if it has several, have the same."""
        return [own for leads, own in self._ranks.gather((self._model.engine.leads, value)) if leads]

    def _batches(self, eval_set: EvaluationSet) -> Iterator[Batch]:
        """Load this rank's batches, and bring them to the device once for all looks at them."""
        assert self._tokenize is not None
        shard = self._model.engine.dp_rank, self._model.engine.dp_size
        return map(self._device.to_device, eval_set.batches(self._tokenize, self._model.family.features, *shard))


def due_of(eval_set: EvaluationSet) -> Due:
    """Return when a set is measured: where nothing is said, each epoch."""
    validation, own = eval_set.cfg.validation, eval_set.cfg.eval
    if eval_set.held_out:
        default = None if validation.every_n_steps else 1
        return Due(validation.every_n_steps, validation.every_n_epochs or default)
    default = None if own.every_n_steps or own.every_n_examples else 1
    return Due(own.every_n_steps, own.every_n_epochs or default, own.every_n_examples)


def tags(name: str, prefix: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Name the losses of a set as trackers and evaluation.jsonl have them: of each quantile, and their mean.

    So is what was measured beside the loss, which may be a sum of it; NaN where one of the quantiles has none.
    """
    measured = [{"loss": row["loss"], **row.get("metrics", {})} for row in rows]
    values_of: dict[str, float] = {}
    for measure in dict.fromkeys(key for measures in measured for key in measures):
        values = [float(measures.get(measure, math.nan)) for measures in measured]
        places = [f"{name}/{prefix}{measure}_quantile_{row['quantile']:.2f}" for row in rows]
        values_of |= dict(zip(places, values, strict=True))
        values_of[f"{name}/{prefix}{measure}"] = math.fsum(values) / len(values)
    return values_of
