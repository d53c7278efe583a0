"""Pictures drawn during training, from the averaged weights where the run has some that are more than their start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.cache.build import on_device
from difftrain.config import TrainConfig
from difftrain.config.schema.families import learns_flow, row_of
from difftrain.config.schema.names import FLOW_SAMPLERS
from difftrain.config.spellings.spelling import option
from difftrain.device.memory import SAMPLING, during
from difftrain.distributed.collective import heartbeat
from difftrain.sampling import PromptFile, draw_grid, read_prompts
from difftrain.train.evaluating import drawable
from difftrain.train.state import Run

if TYPE_CHECKING:
    from difftrain.train.outputs import RunOutputs

log = logging.getLogger("difftrain")
FOLDER = "sample"


def prompts_of(cfg: TrainConfig) -> PromptFile:
    """Read the prompts that are asked for. Raises ConfigFault with everything that cannot be drawn."""
    if not cfg.sample.prompts:
        return PromptFile()
    return read_prompts(
        Path(cfg.sample.prompts),
        sampler_of(cfg),
        flow=learns_flow(cfg),
        guided=row_of(cfg).has("model.guidance"),
        option=option,
    )


def sampler_of(cfg: TrainConfig) -> str:
    """Return the sampler of prompts that name none; a flow has one of its own where the default is no flow's."""
    flow = learns_flow(cfg)
    return FLOW_SAMPLERS[0] if flow and cfg.sample.sampler not in FLOW_SAMPLERS else cfg.sample.sampler


class Drawing:
    """Draw the prompts every n steps or epochs, before the first step where asked for, and at the end."""

    def __init__(self, run: Run, outputs: RunOutputs | None = None) -> None:
        section = run.cfg.sample
        file = prompts_of(run.cfg)
        self._prompts = file.prompts
        for note in file.notes:
            log.info("samples: %s", note)
        self._steps, self._epochs = section.every_n_steps, section.every_n_epochs
        self._outputs = outputs

    def before_training(self, run: Run) -> None:
        """Draw from the weights at the start."""
        if run.cfg.sample.at_first and run.progress.step == run.begins_at:
            self._draw(run)

    def after_step(self, run: Run) -> None:
        """Draw where it is due, and at the last step."""
        epoch = run.epoch_end()
        by_steps = self._steps and run.progress.step % self._steps == 0
        if by_steps or (epoch and self._epochs and epoch % self._epochs == 0) or not run.steps_left:
            self._draw(run)

    def after_training(self, run: Run) -> None:
        """The last step has drawn."""

    def once(self, run: Run) -> None:
        """Draw from the weights as they stand."""
        self._draw(run)

    def _draw(self, run: Run) -> None:
        """Draw on the logger rank, while the others wait at the next step."""
        if not self._prompts:
            return
        with heartbeat(run.ranks, run.ranks.is_logger):
            if run.ranks.is_logger:
                self._draw_here(run)

    def _draw_here(self, run: Run) -> None:
        epoch = run.epoch_end()
        when = f"e{epoch:06d}" if epoch and not self._steps else f"{run.progress.step:06d}"
        precision = run.cfg.training.mixed_precision
        weights, told = drawable(run)
        with (
            run.clock.paused("sampling"),
            during(SAMPLING),
            weights,
            on_device(run.parts, run.device),
            run.device.autocast(precision),
        ):
            grid = draw_grid(
                run.family.drawer(run.parts),
                self._prompts,
                run.out / FOLDER,
                run.name,
                when,
                sampler=sampler_of(run.cfg),
                seed=run.cfg.training.seed,
            )
        if self._outputs is not None:
            self._outputs.picture(run.progress.step, "samples", grid)
        log.info("samples at step %d, %s: %s", run.progress.step, told, grid)
