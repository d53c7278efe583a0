"""Validation loss during training, on records that are never trained on, with fixed draws."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from difftrain.contracts import Batch
from difftrain.data.evaluation_sets import validation_batches
from difftrain.device.memory import EVALUATING, during
from difftrain.evaluation import quantile_losses, validate
from difftrain.train.averages import HALF, percent
from difftrain.train.state import Run

if TYPE_CHECKING:
    from difftrain.train.outputs import RunOutputs

log = logging.getLogger("difftrain")


def averaged(run: Run) -> AbstractContextManager[None]:
    """Put averaged weights in place, the run's or the optimizer's own: validation looks at those."""
    return run.engine.swapped(run.ema.weights) if run.ema is not None else run.engine.averaged_weights()


def drawable(run: Run) -> tuple[AbstractContextManager[None], str]:
    """Put in place what pictures are drawn from, and say what that is.

    Averaged weights, but those as trained while most of the average is what it began with: of random weights nothing
    but noise is drawn.
    """
    ema = run.ema
    if ema is None:
        return run.engine.averaged_weights(), "trained weights"
    if ema.start_share > HALF:
        return (
            run.engine.averaged_weights(),
            f"trained weights, as the average is still {percent(ema.start_share)} its start",
        )
    return run.engine.swapped(ema.weights), "averaged weights"


class Evaluating:
    """Measure the validation loss every n steps or epochs (each epoch where nothing is said), and at the end."""

    def __init__(self, run: Run, outputs: RunOutputs) -> None:
        section = run.cfg.validation
        self._on = section.split > 0
        self._steps = section.every_n_steps
        self._epochs = section.every_n_epochs or (None if section.every_n_steps else 1)
        self._outputs = outputs
        self._tokenize = run.family.tokenizer(run.parts) if self._on else None

    def before_training(self, run: Run) -> None:
        """Nothing before the first step."""

    def after_step(self, run: Run) -> None:
        """Validate where it is due."""
        if not self._on:
            return
        epoch = run.epoch_end()
        due = self._steps and run.progress.step % self._steps == 0
        if due or (epoch and self._epochs and epoch % self._epochs == 0) or not run.steps_left:
            self._validate(run)

    def after_training(self, run: Run) -> None:
        """The last step has validated."""

    def quantiles(self, run: Run) -> list[dict[str, Any]]:
        """Return the loss at nine quantiles of the timestep, for the report; nothing without held-out records."""
        if not self._on:
            return []
        with run.clock.paused("evaluation"), during(EVALUATING), averaged(run):
            return quantile_losses(run.engine, self._batches(run), run.family.features.draws, gather=run.ranks.gather)

    def _validate(self, run: Run) -> None:
        with run.clock.paused("evaluation"), during(EVALUATING), averaged(run):
            found = validate(run.engine, self._batches(run), gather=run.ranks.gather)
        self._outputs.validated(found.record(run.progress.step), {"loss/validation": found.loss})
        log.info("validation at step %d: loss %.6f over %d records", run.progress.step, found.loss, found.samples)

    def _batches(self, run: Run) -> Iterable[Batch]:
        assert self._tokenize is not None
        return validation_batches(
            run.data, self._tokenize, run.family.features, run.cfg, run.engine.dp_rank, run.engine.dp_size
        )
