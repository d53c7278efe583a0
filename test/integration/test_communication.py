"""Bytes of an update by the cost model beside those counted on two ranks, or four, engine by engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import third_patch
import torch

from difftrain.config import TrainConfig
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.family import TinyFamily, TinyRoot, tiny_step
from difftrain.testing.spawn import run_ranks
from difftrain.train.estimate import communication
from difftrain.train.estimate.communication import collectives, cut_size, size_of, spread_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # the ranks are no pytest
import families
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
# a family, processes, and how its model is cut: of tiny SDXL residuals cross the cut, of SD3 text and its reconstruction
PIPELINES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sdxl": ("sdxl", 2, {"pipeline_stages": 2}),
    "sd3 in bf16": ("sd3", 2, {"pipeline_stages": 2, "mixed_precision": "bf16"}),
    "sd3 of two replicas": ("sd3", 4, {"pipeline_stages": 2}),
    "sdxl of four stages": ("sdxl", 4, {"pipeline_stages": 4}),
}
MICRO, BATCH = 3, 2
POINT: communication.Kind = get_args(communication.Kind)[-1]


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
        for name, (family, size, training) in PIPELINES.items():
            if size == ranks.size:
                payloads = ranks.gather(_piped(ranks, family, training))
                found[name] = {key: max(payload.get(key, 0) for payload in payloads) for key in payloads[0]}
        if ranks.is_logger:
            (Path(folder) / "counted.json").write_text(json.dumps(found))


def _piped(ranks: Ranks, name: str, training: dict[str, Any]) -> dict[str, int]:
    """Count the third update of a model that is cut into stages: schedules find out shapes before."""
    cfg = _pipeline(name, training)
    engine: Any = make_engine(cfg, choose("cpu"), ranks)
    family = families.made(cfg)
    engine.build(
        family,
        family.load(),
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=engine.dp_size),
        lambda made: make_schedule(cfg.optimizer, made, 20),
        [],
    )
    bucket, counts = families.bucket_of(family.name), {"samples": float(BATCH * MICRO * engine.dp_size)}
    for step in range(3):
        seeds = range(100 * step, 100 * step + MICRO)
        words = ("a red cat on a table", "two dogs")
        micro = [families.batch_of(family, bucket, words, seed=seed, parts=engine.parts) for seed in seeds]
        with CollectiveCount() as counted:
            engine.step(micro, counts)
    return {f"{kind} {size}": n for (kind, size), n in counted.payload.items()}


def _pipeline(name: str, training: dict[str, Any]) -> TrainConfig:
    return families.config(name, {"training": {"seed": 3, "accumulation": MICRO, **training}})


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
def counted(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("counted")
    both: dict[str, dict[str, int]] = {}
    wide = any(item.get_closest_marker("nightly") for item in request.session.items)
    for size in (2, 4) if wide else (2,):
        run_ranks(size, f"{__file__}::count", folder, timeout_s=240)
        both |= json.loads((folder / "counted.json").read_text())
    return both


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.nightly) for name in OF_FOUR)])
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if size == 4 else ()) for name, (_, size, _) in PIPELINES.items()],
)
def test_bytes_between_stages_are_those_that_are_counted(counted: dict[str, dict[str, int]], name: str) -> None:
    """Of each kind, of the rank that sends most of it: the others wait for it."""
    kind, size, training = PIPELINES[name]
    cfg = _pipeline(kind, training)
    family = families.made(cfg)
    parts = family.load(meta=True)
    root = parts.root.to("meta")
    model = cut_size(cfg, family, root, size_of(root, family.repeated(parts)), families.bucket_of(family.name), BATCH)
    expected = {f"{item.kind} {item.among}": item.payload for item in collectives(spread_of(cfg, size), model)}
    found = {key.replace("_", "-").replace("point-to-point", POINT): value for key, value in counted[name].items()}
    assert {key for key, value in found.items() if value > 5000} == set(expected), found
    for key, payload in expected.items():
        assert found[key] == pytest.approx(payload, rel=0.05), key
