"""Engines on the tiny family, for tests that step them by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from difftrain.config.schema.sections import OptimizerSection, TrainConfig, TrainingSection
from difftrain.contracts import Batch, Group
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.engine.checkpointing import CheckpointedEngine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.family import TinyFamily, tiny_step

COUNTS = {"samples": 8.0}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(training: dict | None = None, **optimizer) -> TrainConfig:
    optimizer = {"scheduler": "cosine", "warmup_steps": 2, **optimizer}
    return TrainConfig(training=TrainingSection(seed=3, **(training or {})), optimizer=OptimizerSection(**optimizer))


class OneRate(TinyFamily):
    """Both groups have the same rate, as those optimizers need it that estimate one."""

    def param_groups(self, root: torch.nn.Module) -> list[Group]:
        return [Group(each.name, each.named_params, self.lr) for each in super().param_groups(root)]


def built(
    cfg: TrainConfig | None = None, family: TinyFamily | None = None, device: str = "cpu", **options: Any
) -> CheckpointedEngine:
    """Build the engine that a configuration names, the native one; options: of make_optimizer."""
    cfg = cfg or config()
    family = family or TinyFamily()
    engine = make_engine(cfg, choose(device), Ranks())
    engine.build(
        family,
        family.load(),
        lambda groups: make_optimizer(cfg.optimizer, groups, **options),
        lambda optimizer: make_schedule(cfg.optimizer, optimizer, 20),
        [],
    )
    assert isinstance(engine, CheckpointedEngine)
    return engine


def run(engine: CheckpointedEngine, first: int, last: int, accumulation: int = 1) -> list[float]:
    return [
        float(engine.step(tiny_step(step, 8, accumulation=accumulation), COUNTS).sums["loss"])
        for step in range(first, last)
    ]


def spoilt(step: int, value: float) -> list[Batch]:
    """Return two micro batches of a step, one of whose samples holds a value that is none."""
    micro = tiny_step(step, 8, accumulation=2)
    micro[0].features["pixels"][1, 0, 0, 0] = value
    return micro


def weights(engine: CheckpointedEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saved(engine: CheckpointedEngine, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    written = engine.snapshot().write(folder)
    assert all(path.suffix in (".safetensors", ".json") for path in written)
    return folder
