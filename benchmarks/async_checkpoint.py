"""How long training stands still for a checkpoint in the background, over what a synchronous save takes, alternating.

    python benchmarks/async_checkpoint.py --folder=/data/scratch        two minutes

A state of --gib in fp32 (weights, two moments of AdamW, a moving average) goes the way of a run's: engine, copies, the
durable commit with its checksums, every file flushed to the disk, the older ones verified and removed. Before each save
one update changes all of it. Of a save in the background counts the time in which training stands still, by the account of
the run's own clock; it is waited for outside of it, while the loop goes on stepping. Then the whole: the time until a save
in the background was committed, over that of a synchronous save and as many steps alone. Exit code 1 where the limit of the
stall is missed.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "library"))

from difftrain.checkpoint import Claim, SaveName  # noqa: E402
from difftrain.config.schema.sections import TrainConfig  # noqa: E402
from difftrain.device import choose  # noqa: E402
from difftrain.distributed.ranks import Ranks  # noqa: E402
from difftrain.engine import make_engine  # noqa: E402
from difftrain.hub.uploads import Uploads  # noqa: E402
from difftrain.optim import make_optimizer, make_schedule  # noqa: E402
from difftrain.report.clock import Clock  # noqa: E402
from difftrain.report.notices import Notices  # noqa: E402
from difftrain.testing.family import TinyFamily, tiny_step  # noqa: E402
from difftrain.train.averages import Averages  # noqa: E402
from difftrain.train.checkpoints import Checkpoints  # noqa: E402
from difftrain.train.state import Position, TrainedModel, TrainProgress  # noqa: E402

LIMIT = 0.10
BLOCKS, BATCH = 8, 8
TENSORS = 4  # of a weight: itself, two moments, its average


class WideRun:
    """A run of the tiny family, made wide, that is stepped by hand."""

    def __init__(self, folder: Path, gib: float, *, asynchronous: bool) -> None:
        width = int((gib * (1 << 30) / 4 / TENSORS / (4 * BLOCKS)) ** 0.5)  # a block has 4 width^2 weights
        save = {"output_dir": str(folder), "output_name": "N", "asynchronous": asynchronous, "last_n_steps_state": 1}
        cfg = TrainConfig.model_validate({"save": save, "ema": {"enable": True}})
        family = TinyFamily(width=width, blocks=BLOCKS)
        self.engine: Any = make_engine(cfg, choose("cpu"), Ranks())
        parts = family.load()
        self.engine.build(
            family,
            parts,
            lambda groups: make_optimizer(cfg.optimizer, groups),
            lambda optimizer: make_schedule(cfg.optimizer, optimizer, 1000),
            [],
        )
        self.averages, self.progress, self.clock = Averages(cfg.ema, self.engine), TrainProgress(), Clock()
        model = TrainedModel(family, parts, self.engine, self.averages)  # type: ignore[arg-type]
        meter: Any = SimpleNamespace(update_progress=lambda: self.progress)
        claim = Claim.acquire(folder)

        def meta(kind: str) -> dict[str, object]:
            return {"step": self.progress.step, "kind": kind}

        self.checkpoints = Checkpoints(
            cfg, model, Ranks(), self.clock, claim, meter, Uploads(), Notices(), meta, lambda: None
        )

    def step(self) -> float:
        """Update all weights once and return the seconds of it."""
        began = time.perf_counter()
        self.engine.step(tiny_step(self.progress.step, BATCH), {"samples": float(BATCH)})
        self.averages.update(self.progress.step)
        self.progress.step += 1
        return time.perf_counter() - began

    def save(self) -> tuple[float, float, list[float]]:
        """Save once; return the seconds in which training stood still, those until it was committed, and steps beside it."""
        before = self.clock.session().pauses_s.get("saving", 0.0)
        step, began, steps = self.progress.step, time.perf_counter(), []
        self.checkpoints.write(Position(step), SaveName("step", step))
        while self.checkpoints.saved_at != step:
            steps.append(self.step())
            self.checkpoints.settle(wait=False)
        return self.clock.session().pauses_s["saving"] - before, time.perf_counter() - began, steps


def main() -> int:
    """Save in both ways in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the disk that is written to; unset: a temporary one")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("difftrain").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="async-checkpoint-", dir=options.folder))
    try:
        return measure(folder, options.gib, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, gib: float, rounds: int) -> int:
    """Return 1 where the limit is missed."""
    now, later = (WideRun(folder / word, gib, asynchronous=word == "later") for word in ("now", "later"))
    for run in (now, later):
        run.step()
        run.checkpoints.reserve(due=True)  # as behind the first step of a run

    ratios, wholes, beside, alone = [], [], [], []
    print(
        f"{'save':>6} {'synchronous s':>14} {'training waits s':>17} {'ratio':>7} {'in the background s':>20} {'steps':>6} {'whole':>6}"
    )
    for number in range(rounds + 1):
        alone += [now.step() for _ in range(3)]
        sync_s, _, _ = now.save()
        later.step()
        stall_s, total_s, steps = later.save()
        beside += steps
        wholes.append(total_s / (sync_s + len(steps) * statistics.median(alone)))
        ratios.append(stall_s / sync_s)
        first = "  the first" if not number else ""
        print(
            f"{number + 1:>6} {sync_s:>14.2f} {stall_s:>17.3f} {ratios[-1]:>7.3f} {total_s:>20.2f}{first}", flush=True
        )

    ratio = statistics.median(ratios[1:])
    slower = statistics.median(beside) / statistics.median(alone)
    size = later.checkpoints._size / (1 << 30)
    print(
        f"{size:.2f} GiB, {torch.get_num_threads()} threads: stall {ratio:.3f} of a synchronous save, limit {LIMIT:.2f}"
    )
    print(f"a step beside the writing thread takes {slower:.2f} of one alone ({statistics.median(alone):.3f} s)")
    print(f"saves and steps together: {statistics.median(wholes[1:]):.2f} of the synchronous time")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
