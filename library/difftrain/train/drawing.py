"""Pictures drawn during training, from the averaged weights where the run has some that are more than their start."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import difftrain
from difftrain.cache.build import on_device
from difftrain.config import TrainConfig
from difftrain.config.schema.families import learns_flow, row_of
from difftrain.config.schema.names import FLOW_SAMPLERS
from difftrain.config.spellings.spelling import is_kohyas, option
from difftrain.contracts import ConfigFault, Fault
from difftrain.device.memory import SAMPLING, during
from difftrain.distributed.collective import heartbeat
from difftrain.sampling import Prompt, PromptFile, draw_grid, draw_pictures, read_prompts
from difftrain.sampling.edits import check_references
from difftrain.train.drawn_clips import write_beside
from difftrain.train.state import Due, Position, TrainedModel

if TYPE_CHECKING:
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock
    from difftrain.train.outputs import RunOutputs

log = logging.getLogger("difftrain")
FOLDER = "sample"
TEXT_STEPS = 20  # of a prompt in words, as diffusers' examples draw them


def prompts_of(cfg: TrainConfig) -> PromptFile:
    """Read the prompts that are asked for, in words and in a file. Raises ConfigFault with all that cannot be drawn."""
    width, height = cfg.data.resolution or (None, None)
    if references_of(cfg) and cfg.sample.texts:
        what = f"names no reference images, and {row_of(cfg).title} draws from such"
        raise ConfigFault(
            [Fault(option("sample.texts"), what, f"a file of prompts with --ci: {option('sample.prompts')}")]
        )
    words = tuple(Prompt(text, width=width, height=height, sample_steps=TEXT_STEPS) for text in cfg.sample.texts)
    if not cfg.sample.prompts:
        return PromptFile(words)
    file = read_prompts(
        Path(cfg.sample.prompts),
        sampler_of(cfg),
        flow=learns_flow(cfg),
        guided=row_of(cfg).has("model.guidance"),
        references=references_of(cfg),
        clips=row_of(cfg).clips is not None,
        option=option,
        passes_over=is_kohyas(),
    )
    check_references(file.prompts)
    return replace(file, prompts=(*words, *file.prompts))


def references_of(cfg: TrainConfig) -> int:
    """Return how many reference images a prompt must name."""
    row = row_of(cfg)
    return max(row.control_least, cfg.data.num_control) if row.control else row.shown_frames


def sampler_of(cfg: TrainConfig) -> str:
    """Return the sampler of prompts that name none; a flow has one of its own where the default is no flow's."""
    flow = learns_flow(cfg)
    return FLOW_SAMPLERS[0] if flow and cfg.sample.sampler not in FLOW_SAMPLERS else cfg.sample.sampler


class Drawing:
    """Draw the prompts every n steps or epochs, before the first step where asked for, and at the end."""

    def __init__(
        self,
        cfg: TrainConfig,
        model: TrainedModel,
        device: Device,
        ranks: Ranks,
        clock: Clock,
        outputs: RunOutputs | None = None,
    ) -> None:
        self._cfg, self._model, self._device, self._ranks = cfg, model, device, ranks
        self._clock, self._outputs = clock, outputs
        file = prompts_of(cfg)
        self._prompts = file.prompts
        for note in file.notes:
            log.info("samples: %s", note)
        sample = cfg.sample
        self._due = Due(sample.every_n_steps, sample.every_n_epochs, from_first_epoch=sample.from_first_epoch)

    def before_training(self, at: Position) -> None:
        """Draw from the weights at the start."""
        if self._cfg.sample.at_first and at.at_start:
            self.draw(at)

    def after_step(self, at: Position) -> None:
        """Draw where it is due, and at the last step."""
        if self._due(at):
            self.draw(at)

    def draw_now(self, at: Position) -> None:
        """Draw because somebody asked for it. Every rank calls it."""
        if not self._prompts and self._ranks.is_logger:
            log.warning("samples were requested, and there are no prompts: %s sets them", option("sample.prompts"))
        self.draw(at)

    def draw(self, at: Position) -> None:
        """Draw from the weights as they stand, on the first replica, while the others wait at the next step.

        Where a forward takes all ranks, all draw the same, and the logger alone writes; of a pipeline the rank that leads
        draws, and the others answer its calls.
        """
        if not self._prompts:
            return
        engine = self._model.engine
        draws = engine.dp_rank == 0 or engine.all_forward
        with heartbeat(self._ranks, draws):
            if draws and (engine.leads or engine.all_forward):
                self._draw_here(at)
            elif draws:
                with self._model.averages.drawable()[0], engine.drawing():
                    pass  # the rank that leads has drawn

    def _draw_here(self, at: Position) -> None:
        cfg, parts, engine = self._cfg, self._model.parts, self._model.engine
        when = f"e{at.epoch_end:06d}" if at.epoch_end and not cfg.sample.every_n_steps else f"{at.step:06d}"
        if (
            self._ranks.is_logger and (cfg.output_dir / FOLDER).is_file()
        ):  # it asks for samples, and would be in the way of these
            (cfg.output_dir / FOLDER).unlink(missing_ok=True)
        weights, description = self._model.averages.drawable()
        with (
            self._clock.paused("sampling"),
            during(SAMPLING),
            weights,
            on_device(parts, self._device),
            self._device.autocast(cfg.training.mixed_precision),
            engine.drawing() as predict,
        ):
            drawer = self._model.family.drawer(parts, predict)
            if not self._ranks.is_logger:
                draw_pictures(drawer, self._prompts, sampler=sampler_of(cfg), seed=cfg.training.seed)
                return
            grid = draw_grid(
                drawer,
                self._prompts,
                cfg.output_dir / FOLDER,
                cfg.save.output_name,
                when,
                sampler=sampler_of(cfg),
                seed=cfg.training.seed,
                about={"weights": cfg.save.output_name, "step": at.step, "version": difftrain.__version__},
                write_clip=write_beside,
            )
        if self._outputs is not None:
            self._outputs.picture("samples", grid, [prompt.prompt for prompt in self._prompts])
        log.info("samples at step %d, %s: %s", at.step, description, grid)
