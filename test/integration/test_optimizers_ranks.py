"""Optimizers with state of every kind on two ranks: a restart is seen by nobody."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from difftrain import checkpoint
from difftrain.config.schema.sections import OptimizerSection, TrainConfig, TrainingSection
from difftrain.contracts import Group, Parts
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.engine.native import NativeEngine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step
from difftrain.testing.spawn import run_ranks

KINDS = {
    "Prodigy": {"learning_rate": 1.0, "args": ("d0=1e-3",)},
    "AdamW8bit": {},
    "AdamWScheduleFree": {},
    "oss": {},
    "Muon": {"args": ("adamw_lr=3e-3",)},
}


class OneRate(TinyFamily):
    """Both groups have the same rate, and the first layer none."""

    def load(self, *, meta: bool = False) -> Parts:
        parts = super().load(meta=meta)
        parts.root.first.requires_grad_(False)  # type: ignore[union-attr]
        return parts

    def param_groups(self, root: torch.nn.Module) -> list[Group]:
        return [Group(each.name, each.named_params, self.lr) for each in super().param_groups(root)]


def built(ranks: Ranks, kind: str) -> NativeEngine:
    optimizer = OptimizerSection(type=kind, **{"learning_rate": 1e-3, **KINDS[kind]})
    cfg = TrainConfig(training=TrainingSection(seed=3), optimizer=optimizer)
    family = OneRate(lr=optimizer.learning_rate, width=128, blocks=1, dropout=0.2)
    engine = make_engine(cfg, choose("cpu"), ranks)
    engine.build(
        family,
        family.load(),
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=ranks.size),
        lambda made: make_schedule(cfg.optimizer, made, 20),
        [tiny_batch(range(100, 102))],
    )
    return engine


def run(engine: NativeEngine, first: int, last: int) -> list[float]:
    steps = [tiny_step(step, 8, engine.dp_rank, engine.dp_size) for step in range(first, last)]
    return [float(engine.step(micro, {"samples": 8.0}).sums["loss"]) for micro in steps]


def weights(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_weights()}


def cases(folder: str) -> None:
    """Run every kind on these ranks: six steps, against three, a restart and three."""
    found = {}
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks:
        for kind in KINDS:
            straight = built(ranks, kind)
            run(straight, 0, 3)
            path = checkpoint.commit(Path(folder), f"{kind}-state", straight.snapshot().write, ranks, {"step": 3})
            with straight.averaged_weights():
                used = weights(straight)
            losses = run(straight, 3, 6)
            resumed = built(ranks, kind)
            resumed.restore(path)
            with resumed.averaged_weights():
                same_use = all(torch.equal(tensor, used[name]) for name, tensor in weights(resumed).items())
            same = run(resumed, 3, 6) == losses
            one, other = weights(straight), weights(resumed)
            equal = all(torch.equal(one[name], other[name]) for name in one)
            sums = [float(tensor.double().sum()) for tensor in one.values()]
            found[kind] = [same, same_use, equal, len({str(each) for each in ranks.gather(sums)})]
        if ranks.is_logger:
            (Path(folder) / "found.json").write_text(json.dumps(found))


def test_state_comes_back_on_two_ranks_and_they_stay_together(tmp_path: Path) -> None:
    run_ranks(2, f"{__file__}::cases", tmp_path)
    assert json.loads((tmp_path / "found.json").read_text()) == {kind: [True, True, True, 1] for kind in KINDS}
