"""How long training stands still for a checkpoint: asynchronous saving over synchronous saving, alternating.

    python benchmarks/async_checkpoint.py --folder=/data/scratch        about two minutes

A state of --gib (weights, two moments of AdamW and a moving average, in fp32) goes the way of a run's: engine, snapshot,
Saving, the durable commit with its checksums, each file flushed to the disk. Every save comes after an update that changes
all of it. Synchronous saves end before training goes on; of asynchronous ones the time counts in which training stands
still, from the clock's own account, and each is waited for before the next. Exit code 1 where the limit is missed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "library"))

from difftrain.config.schema.sections import TrainConfig  # noqa: E402
from difftrain.device import choose  # noqa: E402
from difftrain.distributed.ranks import Ranks  # noqa: E402
from difftrain.engine import make_engine  # noqa: E402

LIMIT = 0.10
KINDS = 4  # weights, two moments, an average
BLOCKS = 24


class Wide(torch.nn.Module):
    """Layers that are never called: only their weights count."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        side = int((numel / BLOCKS) ** 0.5)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(side, side, bias=False) for _ in range(BLOCKS)])


class Run:
    """One run's saving, over an engine that is updated by hand."""

    def __init__(self, folder: Path, gib: float, *, asynchronous: bool) -> None:
        save = {"output_dir": str(folder), "asynchronous": asynchronous, "state": True, "every_n_steps": 1}
        self.cfg = TrainConfig.model_validate({"save": {**save, "last_n_steps_state": 1}, "ema": {"enable": True}})
        device, ranks = choose("cpu", 0, 1), Ranks()
        self.root = Wide(int(gib * (1 << 30) / 4 / KINDS))
        self.engine: Any = make_engine(self.cfg, device, ranks)
        self.engine.root = self.root
