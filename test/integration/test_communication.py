"""Bytes of an update by the cost model beside those counted on two ranks, or four, engine by engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import third_patch
import torch

from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.testing.family import TinyFamily, TinyRoot, tiny_step
from difftrain.testing.spawn import run_ranks
from difftrain.train.estimate import communication
from difftrain.train.estimate.communication import collectives, size_of, spread_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # the ranks are no pytest
from collectives import CollectiveCount
from ways import COUNTS, GLOBAL_BATCH, built, config

WIDE = {"width": 256, "blocks": 2, "lr": 1e-4}  # of 551,984 parameters 5 % are in small tensors, for ZeRO 3
REUSE = 520_000  # DeepSpeed's distance of reuse in the case that gathers again: half of the weights lie further, as in a large model
CASES: dict[str, dict[str, Any]] = {
    "ddp native": {"way": "native"},
    "ddp native in bf16": {"way": "native", "full_precision": "bf16", "mixed_precision": "bf16"},
    "ddp accelerate": {"way": "ddp"},
    "oss native": {"way": "oss"},
    "oss fairscale": {"way": "sharded"},
    "zero 1": {"way": "zero1"},
    "zero 2": {"way": "zero2"},
    "zero 2 in bf16": {"way": "zero2", "mixed_precision": "bf16"},
    "zero 3": {"way": "zero3"},
    "zero 3 in bf16": {"way": "zero3", "mixed_precision": "bf16"},
    "zero 3 gathers again": {"way": "zero3"},
    "fsdp full": {"way": "fsdp"},
    "fsdp full in bf16": {"way": "fsdp", "mixed_precision": "bf16"},
    "fsdp never reshards": {"way": "fsdp", "fsdp": {"reshard_after_forward": "never"}},
    "fsdp reduces each": {"way": "fsdp", "fsdp": {"reduce": "each"}},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "fsdp hybrid": {"way": "fsdp", "fsdp": {"shard": "hybrid", "shard_size": 2}},
    "fsdp hybrid reduces each": {"way": "fsdp", "fsdp": {"shard": "hybrid", "shard_size": 2, "reduce": "each"}},
}
PIECES = (1, 2)


def count(folder: str) -> None:
    """Count an update of every case, whole and in two micro batches, on these ranks."""
    third_patch.apply_for("accelerate", "oss")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks:
        for name, case in (CASES if ranks.size == 2 else OF_FOUR).items():
            how = dict(case)
            engine = built(ranks, how.pop("way"), WIDE, **how) if "again" not in name else _near(ranks)
            for step in range(2):
                engine.step(tiny_step(step, GLOBAL_BATCH, ranks.rank, ranks.size), COUNTS)
            for pieces in PIECES:
                with CollectiveCount() as counted:
                    engine.step(tiny_step(2, GLOBAL_BATCH, ranks.rank, ranks.size, pieces), COUNTS)
                found[f"{name} x {pieces}"] = {f"{kind} {size}": n for (kind, size), n in counted.payload.items()}
        if ranks.is_logger:
            (Path(folder) / "counted.json").write_text(json.dumps(found))


def _near(ranks: Ranks) -> Any:
    """Build ZeRO 3 for which a weight's next use is far away, as it is in a model of billions."""
    from difftrain.engine import accelerate_zero

    make = accelerate_zero.make_plugin

    def far(*args: Any) -> Any:
        plugin = make(*args)
        # what is prefetched is kept too, and DeepSpeed's bucket holds all of this model
        near = {"stage3_max_reuse_distance": REUSE, "stage3_prefetch_bucket_size": 0}
        plugin.deepspeed_config["zero_optimization"] |= near
        return plugin

    accelerate_zero.make_plugin = far
    try:
        return built(ranks, "zero3", WIDE)
    finally:
        accelerate_zero.make_plugin = make


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("counted")
    both: dict[str, dict[str, int]] = {}
    for size in (2, 4):
        run_ranks(size, f"{__file__}::count", folder, timeout_s=240)
        both |= json.loads((folder / "counted.json").read_text())
    return both


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", [*CASES, *OF_FOUR])
def test_bytes_are_those_that_are_counted(
    counted: dict[str, dict[str, int]], name: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "again" in name:
        monkeypatch.setattr(communication, "REUSE", REUSE)
    how, size = dict((CASES | OF_FOUR)[name]), 4 if name in OF_FOUR else 2
    cfg = config(how.pop("way"), accumulation=pieces, **how)
    family = TinyFamily(**WIDE)
    model = size_of(TinyRoot(256, 2), family.repeated(family.load()))
    expected = {f"{item.kind} {item.among}": item.payload for item in collectives(spread_of(cfg, size), model)}
    found = {key.replace("_", "-"): value for key, value in counted[f"{name} x {pieces}"].items()}
    small = {key: value for key, value in found.items() if value < 200}  # the loss, the norm
    assert {key for key in found if key not in small} == set(expected), found
    for key, payload in expected.items():
        assert found[key] == pytest.approx(payload, rel=0.05), key
