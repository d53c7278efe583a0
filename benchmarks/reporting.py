"""What reporting every step costs: a line on the console, in metrics.jsonl and for TensorBoard, at most 1 % of a step of 50 ms.

    python benchmarks/reporting.py            200 steps, half a minute on two cores

One run of the tiny SDXL, the real loop with its defaults. Blocks of steps with a line each take turns with blocks without
any, so that a noisy machine slows both. Of each step only what the loop does beside the engine's update counts: loading is
done beforehand, and what is left is reporting, the clock and the hooks. Prints the medians of both kinds, what a line adds,
and the ratio of steps of 50 ms with and without it; exit code 1 where that is above the limit. Judged is the processor
time of the loop's thread: other work on the machine adds to the other figure, the time on the clock. On a CPU nothing is
waited for when a loss is read; on an accelerator the host then waits for the step's own work, which this leaves out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from figures import Report
from loop import batches_of, config

from difftrain.contracts import Batch
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.testing.pictures import write_folder
from difftrain.train.loop import train
from difftrain.train.meter import Meter
from difftrain.train.outputs import open_outputs
from difftrain.train.run import assemble, make_hooks
from difftrain.train.session import open_session
from difftrain.train.triggers import Requests

BLOCK = 10  # steps of one kind in a row; the first of each reads what the block before has left, and is not counted
STEP_S = 0.050
LIMIT = 1.01
NEVER = 10**9


class Times(NamedTuple):
    """Seconds on the clock, and of the processor in this thread."""

    clock: float
    processor: float


def now() -> Times:
    """Read both clocks."""
    return Times(time.perf_counter(), time.thread_time())


def since(began: Times) -> Times:
    """Return what has passed on both."""
    return Times(*(end - begin for end, begin in zip(now(), began)))


class Blocks:
    """Hand out batches, with and without reporting in turns, and time what the loop does beside the update."""

    def __init__(self, batches: list[list[Batch]], engine: Any) -> None:
        self.batches, self.meter = batches, None
        self.seconds: dict[int, list[Times]] = {1: [], NEVER: []}  # by log_every
        self._updating, self._update = Times(0.0, 0.0), engine.step
        engine.step = self._timed

    def _timed(self, *arguments: Any) -> Any:
        began = now()
        try:
            return self._update(*arguments)
        finally:
            self._updating = since(began)

    def __iter__(self) -> Iterator[list[Batch]]:
        assert isinstance(self.meter, Meter)
        configs = {every: logging_every(self.meter._cfg, every) for every in self.seconds}
        for number, micro in enumerate(self.batches):
            every = 1 if number // BLOCK % 2 else NEVER
            self.meter._cfg = configs[every]
            began = now()
            yield micro  # comes back when the loop asks for the next batch
            whole = since(began)
            if number % BLOCK and number >= BLOCK:
                beside = (all_of - update for all_of, update in zip(whole, self._updating))
                self.seconds[every].append(Times(*beside))


def logging_every(cfg: Any, every: int) -> Any:
    """Return the configuration with a line every so many steps."""
    return cfg.model_copy(update={"logging": cfg.logging.model_copy(update={"log_every": every})})


def measure(folder: Path, steps: int) -> dict[int, list[Times]]:
    """Train, and return the seconds beside the update of each step, by kind."""
    write_folder(folder / "data", [(64, 64)] * 8)
    cfg = config(folder, 1, 64, steps)
    boards = {"logging_dir": str(folder / "boards"), "log_with": "tensorboard"}
    cfg = cfg.model_copy(update={"logging": cfg.logging.model_copy(update=boards)})
    ranks = Ranks()
    with open_session(cfg, ranks, drawn_seed=1) as start, contextlib.redirect_stdout(io.StringIO()):
        run = assemble(start.cfg, ["reporting.py"], choose("cpu"), ranks, start, start.cfg)
        blocks = Blocks(batches_of(run), run.model.engine)
        with open_outputs(run) as outputs:
            meter, saving, evaluating, drawing = make_hooks(run, outputs)
            blocks.meter = meter
            train(run, blocks, [saving, evaluating, drawing], meter, saving, Requests(), drawing.draw_now)
    return blocks.seconds


def main() -> int:
    """Measure, print, and say whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reporting-") as folder:
        seconds = measure(Path(folder), options.steps)
    report = Report()
    print(f"{len(seconds[1])} steps with a line and {len(seconds[NEVER])} without, load {os.getloadavg()[0]:.1f}")
    for kind in Times._fields:
        each, none = (statistics.median(getattr(times, kind) for times in seconds[every]) for every in (1, NEVER))
        report.log(f"beside the update with a line, {kind}", 1000 * each, "ms", f"without {1000 * none:.3f}")
        ratio = (STEP_S + each) / (STEP_S + none)
        if kind == "processor":
            report.check("a step of 50 ms with a line over one without", ratio, LIMIT, "")
            # lines that wait for one another cost nothing, and the one that hands them over all: the mean has both
            mean, plain = (statistics.fmean(times.processor for times in seconds[every]) for every in (1, NEVER))
            report.log("the same of the means", (STEP_S + mean) / (STEP_S + plain), "")
        else:
            report.log("a step of 50 ms with a line over one without", ratio, "")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
