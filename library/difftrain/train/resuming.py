"""What a session takes from the checkpoint that it goes on from, and what it is told to begin anew."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.contracts import ConfigFault, Fault
from difftrain.train.averages import load_averages
from difftrain.train.progress import PROGRESS_FILE, Progress
from difftrain.train.run_dir import resume_option
from difftrain.train.saving import CLOCK_FILE
from difftrain.train.start import Start
from difftrain.train.state import Run
from difftrain.train.together import for_all

if TYPE_CHECKING:
    from difftrain.data.plan import EpochPlan

log = logging.getLogger("difftrain")


def place(plan: EpochPlan, start: Start) -> None:
    """Bring the plan to where the checkpoint was in the data; with --reset_dataloader its epoch begins anew there.

    As in diffusion-pipe the number of the epoch stays, and so do the steps and examples that are counted.
    """
    if start.checkpoint is None:
        return
    if not start.cfg.save.reset_dataloader:
        plan.offset = int(start.meta.get("data_offset", 0))
        return
    epoch = start.meta.get("epoch")
    if epoch is None:  # written before checkpoints said it
        epoch, _ = plan.locate(start.step)
    plan.begin_epoch_at(int(epoch), start.step)
    log.info("--reset_dataloader: epoch %d begins anew with step %d", epoch + 1, start.step + 1)


def check_length(start: Start, total: int) -> None:
    """Refuse to train a run that is shorter than what is done already. Raises ConfigFault."""
    if start.checkpoint is not None and start.step > total and not start.cfg.sample.test_only:
        what = f"the checkpoint is of step {start.step}, the run has {total} step{'s'[: total > 1]}"
        raise ConfigFault(
            [Fault(resume_option(start.cfg.save), what, "train for longer, or go on from an earlier step")]
        )


def schedule_from(start: Start) -> int:
    """Return the number of updates that were done when the schedule of the learning rate began."""
    return start.step if start.cfg.save.reset_optimizer else int(start.meta.get("schedule_from", 0))


def restore(run: Run, start: Start) -> None:
    """Take weights, optimizer, schedule, averages and counters from the checkpoint. Every rank calls it."""
    if start.checkpoint is None:
        return
    save = run.cfg.save
    run.engine.restore(
        start.checkpoint,
        optimizer=not save.reset_optimizer,
        params=not save.reset_optimizer_params,
        schedule_from=run.facts["schedule_from"],
    )
    if save.reset_optimizer:
        log.info("--reset_optimizer: optimizer and schedule begin anew with step %d", start.step + 1)
    elif save.reset_optimizer_params:
        log.info("--reset_optimizer_params: rate, decay and betas are the configuration's, moments the checkpoint's")
    load_counters(run, start.checkpoint)


def load_counters(run: Run, folder: Path) -> None:
    """Take counters, clock and averaged weights from a checkpoint; the engine takes the rest. Every rank calls it.

    The logger's disk has them; ranks of machines with disks of their own get them from there.
    """
    texts = for_all(
        run.ranks, run.ranks.is_logger, lambda: [(folder / name).read_text() for name in (PROGRESS_FILE, CLOCK_FILE)]
    )
    run.progress = Progress.of(texts[0])
    run.clock.load(json.loads(texts[1]))
    load_averages(run, folder)
