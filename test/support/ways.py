"""Ways to wrap a model and shard an optimizer: the native engine beside those of accelerate, on the tiny family.

For tests whose ranks are processes of their own: they find this file where they put test/support on their path.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from difftrain import checkpoint
from difftrain.config.schema.sections import (
    DeepSpeedSection,
    FsdpSection,
    OptimizerSection,
    SaveSection,
    TrainConfig,
    TrainingSection,
)
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.engine.base import BaseEngine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step

GLOBAL_BATCH = 12  # on 2 and 3 ranks, whole and in pieces
COUNTS = {"samples": float(GLOBAL_BATCH)}
STEPS = 12
_ENGINES = {"native": "native", "oss": "native", "fsdp": "fsdp"}


def config(
    way: str, save: dict | None = None, zero: dict | None = None, fsdp: dict | None = None, **training
) -> TrainConfig:
    """Return the configuration of a way: native, oss (torch's), ddp, sharded (fairscale's), zeroN or fsdp."""
    deepspeed = DeepSpeedSection(enable=True, zero_stage=int(way[4:]), **(zero or {})) if way[:4] == "zero" else None
    return TrainConfig(
        training=TrainingSection(seed=3, engine=_ENGINES.get(way, "accelerate"), **training),
        optimizer=OptimizerSection(
            type="oss" if way in ("sharded", "oss") else "AdamW", scheduler="cosine", warmup_steps=2
        ),
        deepspeed=deepspeed or DeepSpeedSection(),
        fsdp=FsdpSection(**(fsdp or {})),
        save=SaveSection(**(save or {})),
    )


def built(ranks: Ranks, way: str, options: dict, kind: str = "cpu", **how) -> BaseEngine:
    cfg = config(way, **how)
    family = TinyFamily(**options)
    engine = make_engine(cfg, choose(kind, ranks.local_rank, ranks.local_size), ranks)
    assert not engine.faults(), engine.faults()
    engine.build(
        family,
        family.load(),
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=ranks.size),
        lambda made: make_schedule(cfg.optimizer, made, 2 * STEPS),
        [tiny_batch(range(100, 102))],
    )
    return engine


def run(engine: BaseEngine, first: int, last: int, pieces: int = 1) -> list[float]:
    deal = (GLOBAL_BATCH, engine.dp_rank, engine.dp_size, pieces)
    return [float(engine.step(tiny_step(step, *deal), COUNTS).sums["loss"]) for step in range(first, last)]


def weights(engine: BaseEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def off(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def commit(engine: BaseEngine, parent: Path, name: str) -> Path:
    snapshot = engine.snapshot()
    return checkpoint.commit(parent, f"{name}-state", snapshot.write, engine.ranks, {"step": engine.position})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return everything that a checkpoint holds, by kind and name."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {f"{path.name.partition('-')[0]} {name}": tensor for name, tensor in load_file(path).items()}
    return found


def spoilt(step: int, ranks: Ranks, value: float) -> list:
    """Return a step whose last rank alone has a bad sample."""
    micro = tiny_step(step, GLOBAL_BATCH, ranks.rank, ranks.size)
    if ranks.rank == ranks.size - 1:
        micro[0].features["pixels"][0, 0, 0, 0] = value
    return micro


def digest(engine: BaseEngine) -> float:
    return float(sum(tensor.double().abs().sum() for tensor in weights(engine).values()))
