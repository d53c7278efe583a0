"""Evaluation sets during training: loss at nine quantiles of the noise, raw and averaged weights, and drawn pictures."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from difftrain.cache.build import with_cache
from difftrain.config import TrainConfig
from difftrain.config.schema.sections import EvalSection, EvalSetSection
from difftrain.contracts import DataFault, Family, Parts
from difftrain.data.evaluation_sets import common_records, config_of, open_set, set_batches
from difftrain.data.loader import check_sizes
from difftrain.data.prepare import Data
from difftrain.device.memory import EVALUATING, during
from difftrain.distributed.collective import on_each_machine
from difftrain.evaluation import quantile_losses
from difftrain.train.kid import DrawnPictures
from difftrain.train.state import EvaluationSet, Run

if TYPE_CHECKING:
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.train.outputs import RunOutputs

log = logging.getLogger("difftrain")
RAW, EMA = "", "ema_"


def open_sets(
    cfg: TrainConfig, device: Device, ranks: Ranks, family: Family, parts: Parts
) -> tuple[EvaluationSet, ...]:
    """Index every evaluation set and build its cache beside the training set's. Every rank calls it.

    Raises what preparing and caching the training set does.
    """
    return tuple(_opened(cfg, section, device, ranks, family, parts) for section in cfg.eval.sets)


def _opened(
    cfg: TrainConfig, section: EvalSetSection, device: Device, ranks: Ranks, family: Family, parts: Parts
) -> EvaluationSet:
    name = f"evaluation set {section.name}"

    def opened() -> Data:
        try:
            return open_set(cfg, section, lambda line: log.info("%s: %s", name, line))
        except DataFault as fault:
            raise DataFault(f"{name}: {fault}") from fault

    data = on_each_machine(ranks, opened)
    check_sizes(data.tables, family.features)
    own = config_of(cfg, section)
    cached = with_cache(own, device, ranks, family, parts, data, trains=False)
    return EvaluationSet(section, own, cached.data, (*data.rejects(), *cached.rejects))


def tags(name: str, prefix: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Name the losses of a set as trackers and evaluation.jsonl have them: of each quantile, and their mean.

    So is what was measured beside the loss, which may be a sum of it; NaN where one of the quantiles has none.
    """
    measured = [{"loss": row["loss"], **row.get("metrics", {})} for row in rows]
    found: dict[str, float] = {}
    for measure in dict.fromkeys(key for each in measured for key in each):
        values = [float(each.get(measure, math.nan)) for each in measured]
        places = [f"{name}/{prefix}{measure}_quantile_{row['quantile']:.2f}" for row in rows]
        found |= dict(zip(places, values, strict=True))
        found[f"{name}/{prefix}{measure}"] = math.fsum(values) / len(values)
    return found


class Due:
    """Tell when something that recurs is due: after so many steps, epochs or examples, and at the last step.

    Where none is said, each epoch.
    """

    def __init__(self, section: EvalSection, samples_seen: int) -> None:
        """Begin. samples_seen: where the session does."""
        self._steps, self._examples = section.every_n_steps, section.every_n_examples
        self._epochs = section.every_n_epochs or (None if self._steps or self._examples else 1)
        self._seen = samples_seen

    def __call__(self, run: Run) -> bool:
        """Ask after every step, once."""
        seen, self._seen = self._seen, run.progress.samples_seen
        if self._examples and seen // self._examples != self._seen // self._examples:
            return True
        if self._steps and run.progress.step % self._steps == 0:
            return True
        epoch = run.epoch_end()
        return bool(epoch and self._epochs and epoch % self._epochs == 0) or not run.steps_left


class EvaluatingSets:
    """Measure every evaluation set where it is due, and leave one line a step in evaluation.jsonl."""

    def __init__(self, run: Run, outputs: RunOutputs) -> None:
        self._outputs = outputs
        self._sets = run.sets
        self._tokenize = run.family.tokenizer(run.parts) if self._sets else None
        for each in self._sets:
            if run.ranks.is_logger and (common := common_records(run.data.index, each.data.index)):
                what = "evaluation set %s: %d of its %d records show pictures that are trained on, too"
                log.warning(what, each.name, common, each.data.index.count)
        self._due = Due(run.cfg.eval, run.progress.samples_seen)
        self._pictures = DrawnPictures(run) if self._sets and run.cfg.eval.kid else None

    def before_training(self, run: Run) -> None:
        """Measure the weights at the start of a fresh run, where asked for."""
        if self._sets and run.cfg.eval.before_first_step and run.progress.step == run.begins_at:
            self._measure(run, losses=True, pictures=self._pictures is not None)

    def after_step(self, run: Run) -> None:
        """Measure where it is due."""
        if not self._sets:
            return
        losses, every = self._due(run), run.cfg.eval.kid_every_n_steps
        pictures = losses if every is None else run.progress.step % every == 0 or not run.steps_left
        pictures = pictures and self._pictures is not None
        if losses or pictures:
            self._measure(run, losses, pictures)

    def after_training(self, run: Run) -> None:
        """The last step has measured."""

    def _measure(self, run: Run, losses: bool, pictures: bool) -> None:
        step = run.progress.step
        record: dict[str, Any] = {
            "step": step,
            "epoch": run.epoch if step else 0,
            "samples_seen": run.progress.samples_seen,
        }
        for each in self._sets:
            if losses:
                with run.clock.paused("evaluation"), during(EVALUATING):
                    record |= self._losses(run, each)
            if pictures and self._pictures is not None:
                record |= self._pictures.measure(run, each)
        self._outputs.evaluated(record)

    def _losses(self, run: Run, each: EvaluationSet) -> dict[str, Any]:
        assert self._tokenize is not None
        place = run.engine.dp_rank, run.engine.dp_size
        batches = set_batches(each.data, self._tokenize, run.family.features, run.cfg, each.section, *place)
        found: dict[str, Any] = {}
        for prefix, weights in looks(run):
            once = map(run.device.to_device, batches)  # for all quantiles
            with weights:
                rows = quantile_losses(run.engine, once, run.family.features.draws, gather=run.ranks.gather)
            found |= {f"{each.name}/samples": rows[0]["samples"]} | tags(each.name, prefix, rows)
            log.info(
                "evaluation of %s at step %d, %s: loss %.6f over %d records; at 0.1 ... 0.9: %s",
                each.name,
                run.progress.step,
                "averaged weights" if prefix else "weights as trained",
                found[f"{each.name}/{prefix}loss"],
                rows[0]["samples"],
                " ".join(f"{row['loss']:.4f}" for row in rows),
            )
        return found


def looks(run: Run) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield the weights that are looked at, by their prefix: as trained, and averaged where the run averages.

    A schedule-free optimizer's weights are its own averages in either case: those are what it has learnt.
    """
    yield RAW, run.engine.averaged_weights()
    if run.ema is not None:
        yield EMA, run.engine.swapped(run.ema.weights)
