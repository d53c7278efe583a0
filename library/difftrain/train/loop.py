"""The one loop, for every family and every engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from difftrain.contracts import Batch
from difftrain.distributed.heartbeats import STEP
from difftrain.train.diagnosis.first_batch import check_encoders
from difftrain.train.diagnosis.out_of_memory import in_step
from difftrain.train.meter import Meter
from difftrain.train.saving import Saving
from difftrain.train.state import Hook, Position, Run
from difftrain.train.triggers import EXPORT, NOTHING, PERIODIC, QUIT, SAMPLE, STOP, Requests

log = logging.getLogger("difftrain")


def train(
    run: Run,
    steps: Iterable[list[Batch]],
    hooks: list[Hook],
    meter: Meter,
    saving: Saving,
    requests: Requests,
    draw: Callable[[Position], None],
) -> bool:
    """Train until the last step, or until somebody asks to stop; return whether all steps are done.

    draw: makes samples, where somebody asks for them.

    A request (a signal to any one rank, a file that one rank sees) is agreed on by all ranks at the same step boundary,
    so that they save the same state and leave together.
    """
    with requests.heeded():
        _steps(run, steps, hooks, meter, saving, requests, draw)
    run.clock.stop()
    return run.steps_left == 0


def _steps(
    run: Run,
    steps: Iterable[list[Batch]],
    hooks: list[Hook],
    meter: Meter,
    saving: Saving,
    requests: Requests,
    draw: Callable[[Position], None],
) -> None:
    run.clock.start()
    is_first = True
    for micro in run.clock.batches(steps):
        run.ranks.doing(f"{STEP}{run.progress.step + 1}")
        # what encoders make is looked at once, before it reaches a weight
        if is_first:
            is_first = False
            with in_step(run.progress.step + 1, micro):
                check_encoders(run, micro)

        # update weights, then their averages
        sizes = run.plan.counts(run.progress.step)
        images = sum(number for _, number in sizes)
        with in_step(run.progress.step + 1, micro), meter.counted(micro):
            stats = run.model.engine.step(micro, {"samples": float(images)})
        meter.say_memory(run.model.parts, run.model.engine)
        run.model.averages.update(run.progress.step)

        # the step counts; hooks come last, they read counters and metrics
        run.progress.step += 1
        run.progress.samples_seen += images
        run.clock.stepped(images, sum(number * run.flops(rows.bucket) for rows, number in sizes))
        at = run.position
        meter.after_step(at, micro, stats)
        run.ranks.doing(f"after step {at.step}")
        for hook in hooks:
            hook.after_step(at)

        # requests take effect between steps, where all ranks are at the same state
        request = run.ranks.agree(max(requests.take(), saving.requested()))
        if request == SAMPLE:
            saving.sampled()
            draw(at)
        elif request != NOTHING and not saving.save_now(at, export=request in (EXPORT, QUIT), wait=request != PERIODIC):
            log.error(
                "the requested save failed; a resume continues from the newest checkpoint before it%s",
                ". The run continues without stopping: free some space, and request it again"
                if request == QUIT
                else "",
            )
        elif request == QUIT:
            return
        if request == STOP:  # who sends a signal does not wait for a disk
            return
