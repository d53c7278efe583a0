"""The one loop, for every family and every engine."""

from __future__ import annotations

from collections.abc import Iterable

from difftrain.contracts import Batch
from difftrain.train.signals import NOTHING, SAVE, STOP, Requests
from difftrain.train.state import Hook, Run


def train(run: Run, steps: Iterable[list[Batch]], hooks: list[Hook], save: Hook, requests: Requests) -> bool:
    """Train until the last step or a request to stop; return whether the run is finished.

    A request (a signal to any one rank) is agreed on by all ranks at the same step boundary, so that they save the
    same state and leave together.
    """
    counts = {"samples": float(run.global_batch)}
    run.clock.start()
    for micro in steps:
        run.clock.data_ready()
        stats = run.engine.step(micro, counts)
        if run.ema is not None:
            run.ema.update((name, shard) for name, shard, _ in run.engine.shards())
        run.progress.step += 1
        run.progress.samples_seen += run.global_batch
        run.meter.after_step(run, micro, stats)
        for hook in hooks:
            hook.after_step(run)
        request = run.ranks.agree(requests.take())
        if request != NOTHING:
            save.after_training(run) if request == STOP else save.save_now(run)
        if request == STOP:
            return run.steps_left == 0
    return True


__all__ = ["SAVE", "train"]
