"""The training loop over a hand-written torch loop, on the same tiny SDXL and the same batches: at most 1.05.

    python benchmarks/loop.py                 60 steps of each, some minutes on two cores

Both loops take turns within one process, step by step (ours first, then theirs first), so that a noisy machine slows
both. Ours is the real one with its defaults: hooks, clock, a metric line and a line of metrics.jsonl every step. Loading
is in neither: the batches are made beforehand. Prints the median of the paired ratios, PASS or FAIL; exit code 1 where
it is missed, or where the losses differ.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import torch
from plain_sdxl import PlainSDXL

from difftrain.config import TrainConfig
from difftrain.contracts import Batch
from difftrain.data.loader import make_loader
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.report.metrics import METRICS, read_lines
from difftrain.testing.pictures import write_folder
from difftrain.train.loop import train
from difftrain.train.outputs import open_outputs
from difftrain.train.run import assemble, make_hooks
from difftrain.train.session import open_session
from difftrain.train.state import Run
from difftrain.train.triggers import Requests

LR = 1e-4
WARM_UP = 5
SAME_LOSS = 1e-4  # relative, fp32, over all steps: orders of sums differ


class Turns:
    """Give our loop its batches, and let the other take its turn in between."""

    def __init__(self, plain: PlainSDXL, batches: list[list[Batch]]) -> None:
        self.plain, self.batches = plain, batches
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.losses: list[float] = []

    def __iter__(self) -> Iterator[list[Batch]]:
        for number, micro in enumerate(self.batches):
            if number % 2:
                self._plain_turn(micro)
            began = time.perf_counter()
            yield micro  # comes back when our loop asks for the next batch: its whole step is in between
            self.ours.append(time.perf_counter() - began)
            if not number % 2:
                self._plain_turn(micro)

    def _plain_turn(self, micro: list[Batch]) -> None:
        began = time.perf_counter()
        self.losses.append(self.plain.step(micro))
        self.theirs.append(time.perf_counter() - began)


def config(folder: Path, batch_size: int, resolution: int, steps: int) -> TrainConfig:
    """Return a plain configuration: nothing is saved, validated or drawn."""
    return TrainConfig.model_validate(
        {
            "model": {"init_from_config": "tiny"},
            "data": {"dirs": (str(folder / "data"),), "resolution": (resolution, resolution), "workers": 0}
            | {"cache_dir": str(folder / "cache")},
            "training": {"batch_size": batch_size, "max_steps": steps, "seed": 1},
            "optimizer": {"learning_rate": LR},
            "save": {"output_dir": str(folder / "out"), "output_name": "loop"},
        }
    )


def take_turns(cfg: TrainConfig) -> tuple[Turns, list[float]]:
    """Train both, and return their times and losses."""
    ranks = Ranks()
    with open_session(cfg, ranks, drawn_seed=1) as start, contextlib.redirect_stdout(io.StringIO()):
        run = assemble(start.cfg, ["loop.py"], choose(cfg.training.device), ranks, start, start.cfg)
        plain = PlainSDXL(run.model.parts, run.device.torch_device, lr=LR)
        turns = Turns(plain, batches_of(run))
        with open_outputs(run) as outputs:
            meter, saving, evaluating, drawing = make_hooks(run, outputs)
            train(run, turns, [saving, evaluating, drawing], meter, saving, Requests(), drawing.draw_now)
    return turns, [line["step_loss"] for line in read_lines(cfg.output_dir / METRICS)]


def batches_of(run: Run) -> list[list[Batch]]:
    """Load every step's micro batches into memory."""
    loader = make_loader(
        run.data,
        run.plan,
        run.model.family.features,
        run.model.family.tokenizer(run.model.parts),
        run.cfg,
        dp_rank=0,
        dp_size=1,
        first_step=0,
        last_step=run.total_steps,
    )
    return list(loader)


def main() -> int:
    """Measure, print, and say whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--limit", type=float, default=1.05)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loop-") as folder:
        side = options.resolution
        write_folder(Path(folder) / "data", [(side, side)] * (4 * options.batch_size))
        turns, losses = take_turns(config(Path(folder), options.batch_size, side, options.steps))
    return verdict(turns, losses, options)


def verdict(turns: Turns, losses: list[float], options: argparse.Namespace) -> int:
    """Print both loops' times and the ratio; return the exit code."""
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, turns.losses, strict=True))
    pairs = [a / b for a, b in zip(turns.ours, turns.theirs)][WARM_UP:]
    ratio = statistics.median(pairs)
    print(
        f"tiny SDXL, batch {options.batch_size} at {options.resolution} px, {len(pairs)} pairs of steps, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for name, times in (("difftrain", turns.ours), ("hand-written", turns.theirs)):
        steady = [1000 * seconds for seconds in times[WARM_UP:]]
        print(f"  {name:13} median {statistics.median(steady):8.2f} ms   min {min(steady):8.2f} ms a step")
    minima = min(turns.ours[WARM_UP:]) / min(turns.theirs[WARM_UP:])
    same = apart <= SAME_LOSS
    print(f"  losses: {apart:.1e} apart at most (limit {SAME_LOSS:.0e})  {'PASS' if same else 'FAIL'}")
    fast = ratio <= options.limit
    print(f"  ratio: {ratio:.3f} (of the minima {minima:.3f}; limit {options.limit})  {'PASS' if fast else 'FAIL'}")
    return 0 if same and fast else 1


if __name__ == "__main__":
    sys.exit(main())
