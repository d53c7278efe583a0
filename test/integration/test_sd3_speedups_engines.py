"""Speed-ups beside everything they are combined with, on two ranks: the losses of the plain native engine."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import third_patch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # the ranks are no pytest
from sd3_speedups import batch_of, config, cut, vision_folder

from difftrain import checkpoint
from difftrain.config.schema.sections import (
    DeepSpeedSection,
    LossSection,
    OptimizerSection,
    PatchMaskingSection,
    RepaSection,
    TrainConfig,
    TrainingSection,
    TreadSection,
)
from difftrain.contracts import Bucket
from difftrain.device import choose
from difftrain.diffusion.ema import Ema
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import accelerate_zero, make_engine
from difftrain.engine.base import BaseEngine
from difftrain.models.families.sd3.family import SD3Family
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.spawn import run_ranks

GLOBAL, STEPS, UNTIL, BUCKET = 4, 3, 2, Bucket(64, 64)
REPA = RepaSection(layer=2, hidden=24, until_step=UNTIL)
SPEEDUPS: dict[str, dict[str, Any]] = {
    "routed": {"tread": TreadSection(share=0.5, end=2), "loss": LossSection(text_recon_gamma=0.1)},
    "masked": {"patch_masking": PatchMaskingSection(share=0.75, mixer_layers=1, until_step=UNTIL)},
}  # both with alignment, which ends
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
CHECKPOINTED = {"gradient_checkpointing": True}


@dataclass(frozen=True)
class Case:
    """One run. pieces: micro batches."""

    speedups: str
    way: str
    pieces: int = 1
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"

    @property
    def name(self) -> str:
        said = [self.optimizer, *(key if value is True else str(value) for key, value in self.training.items())]
        return " ".join([self.speedups, self.way, *said[self.optimizer == "AdamW" :], f"in {self.pieces}"])

    @property
    def plain(self) -> Case:
        """Return the run that this one is compared with: the same, by the native engine and nothing else."""
        kept = {key: value for key, value in self.training.items() if key == "mixed_precision"}
        return Case(self.speedups, "native", 1, kept, self.optimizer)


CASES = [
    *(Case("routed", way) for way in ("oss", "ddp", "sharded", "zero1", "zero2", "zero3")),
    *(Case("masked", way) for way in ("sharded", "zero2")),
    Case("masked", "native", 2, {**CHECKPOINTED, "cpu_offload_checkpointing": True, "ddp_static_graph": True}),
    Case("routed", "native", 1, {**COMPILED, **CHECKPOINTED}),
    Case("routed", "zero2", 2, CHECKPOINTED),
    Case("routed", "zero3", 2, CHECKPOINTED),
    Case("routed", "ddp", 1, {"mixed_precision": "fp16"}),
    Case("masked", "zero3", 1, {"mixed_precision": "bf16"}),
    Case("routed", "ddp", 2, CHECKPOINTED, "Muon"),
]
RESUMED = (CASES[0], CASES[2], CASES[7], CASES[-2])  # oss, sharded, zero2, zero3


# ---------------------------------------------------------------- what the ranks run


def settings(case: Case, vision: str) -> TrainConfig:
    zero = case.way.startswith("zero")
    sharded = case.way in ("oss", "sharded")
    return config(
        **SPEEDUPS[case.speedups],
        repa=REPA.model_copy(update={"encoder": vision}),
        training=TrainingSection(
            seed=3,
            engine="native" if case.way in ("native", "oss") else "accelerate",
            accumulation=case.pieces,
            **case.training,
        ),
        deepspeed=DeepSpeedSection(enable=True, zero_stage=int(case.way[4:])) if zero else DeepSpeedSection(),
        optimizer=OptimizerSection(type="oss" if sharded else case.optimizer, learning_rate=1e-3),
    )


def built(ranks: Ranks, case: Case, vision: str) -> BaseEngine:
    cfg = settings(case, vision)
    family = SD3Family(cfg)
    engine, parts = make_engine(cfg, choose("cpu"), ranks), family.load()
    assert not engine.faults(), engine.faults()
    engine.build(
        family,
        parts,
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=ranks.size),
        lambda made: make_schedule(cfg.optimizer, made, 20),
        [cut(batch_of(family, parts, BUCKET, GLOBAL, 0), ranks.rank, ranks.size)],
    )
    return engine


def run(engine: BaseEngine, pieces: int, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last):
        whole = batch_of(engine.family, engine.parts, BUCKET, GLOBAL, step)
        share, place = GLOBAL // pieces, (engine.dp_rank, engine.dp_size)
        micro = [cut(whole, *place, begin, begin + share) for begin in range(0, GLOBAL, share)]
        stats = engine.step(micro, {"samples": float(GLOBAL)})
        assert not float(stats.skipped)
        found.append(float(stats.sums["loss"]))
    return found


def evaluated(engine: BaseEngine) -> float:
    whole = batch_of(engine.family, engine.parts, BUCKET, GLOBAL, None, trains=False)
    return float(engine.evaluate([cut(whole, engine.dp_rank, engine.dp_size)])["loss"])


def told(engine: BaseEngine, case: Case, out: Path) -> dict[str, Any]:
    """Train, keep an average, look at both; go on from a state too, over the step where terms end."""
    average = Ema(((name, shard) for name, shard, _ in engine.shards()), 0.5)
    losses = run(engine, case.pieces, 0, 1)
    state = None
    if case in RESUMED:
        name = f"{case.name.replace(' ', '-')}-state"
        state = checkpoint.commit(out, name, engine.snapshot().write, engine.ranks, {"step": 1})
    losses += run(engine, case.pieces, 1, STEPS)
    average.update((name, shard) for name, shard, _ in engine.shards())
    found: dict[str, Any] = {"losses": losses, "evaluated": evaluated(engine)}
    if case.way != "zero3":  # test_engine_accelerate.py does that
        with engine.swapped(average.weights):
            found["averaged"] = evaluated(engine)
    whole = dict(engine.full_weights(average.weights))
    found["sum"] = sum(float(value.double().sum()) for value in whole.values())
    if state is not None:
        resumed = built(engine.ranks, case, str(out / "vision"))
        resumed.restore(state)
        found["same"] = run(resumed, case.pieces, 1, STEPS) == losses[1:] and _equal(engine, resumed)
    return found


def _equal(one: BaseEngine, other: BaseEngine) -> bool:
    pairs = zip(one.full_weights(), other.full_weights(), strict=True)
    return all(left[0] == right[0] and torch.equal(left[1], right[1]) for left, right in pairs)


@contextlib.contextmanager
def cut_small_ones() -> Any:
    """Let ZeRO 3 take every weight apart: it leaves those below 100,000 numbers whole, which all are here."""
    real = accelerate_zero.make_plugin

    def made(*args: Any) -> Any:
        plugin = real(*args)
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return plugin

    with mock.patch.object(accelerate_zero, "make_plugin", made):
        yield


def cases(folder: str) -> None:
    """Run every case, and what each is compared with."""
    third_patch.apply_for("accelerate", "oss")
    out, found = Path(folder), {}
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks, cut_small_ones():
        for case in (*CASES, *{each.plain.name: each.plain for each in CASES}.values()):
            found[case.name] = told(built(ranks, case, str(out / "vision")), case, out)
        gathered = ranks.gather(found)
        if ranks.is_logger:
            (out / "found.json").write_text(json.dumps(gathered))


# ---------------------------------------------------------------- what is expected


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run all on two ranks."""
    folder = tmp_path_factory.mktemp("engines")
    vision_folder(folder / "vision", "dinov2")
    run_ranks(2, f"{__file__}::cases", folder, timeout_s=300)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_losses_are_those_of_the_plain_native_engine(launched: list[dict[str, Any]], case: Case) -> None:
    found, other = launched[0][case.name], launched[0][case.plain.name]
    if case.training.get("mixed_precision"):
        limit = 1e-5 if case.training["mixed_precision"] == "fp16" else 2e-2  # DeepSpeed begins at rounded weights
    elif case.optimizer == "Muon":
        limit = 2e-3  # whose directions are rounded to bf16
    else:
        limit = 1e-5 if "compile" in case.training else 1e-6
    for what in found.keys() & {"losses", "evaluated", "averaged"}:
        assert found[what] == pytest.approx(other[what], rel=limit), what
    assert found["sum"] == pytest.approx(other["sum"], rel=limit)
    assert found.get("same") is (True if case in RESUMED else None)
    assert all(each[case.name] == found for each in launched)
