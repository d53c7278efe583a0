"""Two ranks of which one waits for its data and the other computes slowly: both are named, in the log and the report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftrain.testing.spawn import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def slow_in_turn(flags: str) -> None:
    """Train with a slow loader on the first rank, and a slow network on the second."""
    sys.path.insert(0, str(ROOT))
    import os

    from difftrain.cli.train import train_sdxl
    from difftrain.distributed import heartbeats
    from difftrain.train import run
    from difftrain.train.diagnosis import slow_ranks

    heartbeats.BEAT_S = slow_ranks.LOOK_S = 0.3
    slow_ranks.LOOKS = slow_ranks.LEAST_STEPS = 2
    batches_of = run.batches_of

    def late(this: Any) -> Iterator[Any]:
        for batches in batches_of(this):
            time.sleep(0.15)
            yield batches

    if os.environ["RANK"] == "0":
        run.batches_of = late
    else:
        slow_ranks.PaceHook._ends = slowed(slow_ranks.PaceHook._ends)
    sys.exit(train_sdxl(json.loads(flags), "sdxl_pretrain.py"))


def slowed(ends: Any) -> Any:
    def later(self: Any, *words: Any) -> None:
        time.sleep(0.1)
        ends(self, *words)

    return later


def test_a_slow_loader_and_a_slow_device_are_told_apart(tmp_path: Path) -> None:
    from doors import Door, write_pictures

    door, out = Door(write_pictures(tmp_path / "pictures"), tmp_path / "cache"), tmp_path / "out"
    flags = door.flags(out, "--max_data_loader_n_workers=0", "--save_every_n_steps=1000", batch=1, steps=14)
    first, _ = run_ranks(2, f"{__file__}::slow_in_turn", json.dumps(flags), env=door.env)
    said = json.loads((out / "report.json").read_text())["notes"]["slow_ranks"]
    assert {text.split(":")[0] for text in said} == {"rank 0 of 2 is slow (data)", "rank 1 of 2 is slow (compute)"}
    assert all(text in first.err + first.out for text in said)
