"""The contract of every engine in the registry, on one rank: the loop that anybody would write, and its state restored.

Several ranks: test/integration/test_engine_ddp.py and test_engine_accelerate.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import third_patch
import torch
from engines import COUNTS, built, config, equal, run, saved, spoilt, weights

from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import choices_of
from difftrain.contracts import ConfigFault, Parts
from difftrain.contracts.engine import Engine
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import ENGINES, make_engine
from difftrain.engine.checkpointing import CheckpointedEngine
from difftrain.optim import make_schedule
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step

NAN = float("nan")
Build = Callable[..., CheckpointedEngine]


@pytest.fixture(params=ENGINES)
def way(request: pytest.FixtureRequest) -> str:
    """Name an engine of the registry."""
    return str(request.param)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Take away what an engine's package leaves in the environment."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture
def make(way: str) -> Build:
    """Build the engine on the tiny family: sections as engines.config takes them, and TinyFamily's options."""

    def call(
        training: dict[str, Any] | None = None, family: TinyFamily | None = None, **optimizer: Any
    ) -> CheckpointedEngine:
        return built(config({"engine": way, **(training or {})}, **optimizer), family)

    return call


class Frozen(TinyFamily):
    """Its first layer is not trained."""

    def load(self, *, meta: bool = False, **_: Any) -> Parts:
        parts = super().load(meta=meta)
        parts.root.first.requires_grad_(False)
        return parts


class Spare(TinyFamily):
    """It has a layer that no loss depends on."""

    def load(self, *, meta: bool = False, **_: Any) -> Parts:
        parts = super().load(meta=meta)
        parts.root.extra = torch.nn.Linear(2, 2)
        return parts


def losses_of(engine: CheckpointedEngine, steps: int) -> list[float]:
    return run(engine, engine.position, engine.position + steps)


# ---------------------------------------------------------------- its place


@pytest.mark.flags("engine")
def test_the_configuration_and_the_patches_know_it(way: str, make: Build) -> None:
    assert set(ENGINES) == set(choices_of("training.engine")) == set(third_patch.PATCHES)
    engine = make()
    assert engine.name == way and engine.faults() == []
    needed = {name for name, each in vars(Engine).items() if callable(each) and not name.startswith("_")}
    assert len(needed) > 10 and [name for name in needed if not callable(getattr(engine, name, None))] == []
    assert (engine.dp_rank, engine.dp_size, engine.is_logger) == (0, 1, True)


def test_one_that_is_not_there_is_named(way: str) -> None:
    cfg = TrainConfig()
    cfg.training.__dict__["engine"] = f"{way}x"
    with pytest.raises(ConfigFault, match=f"there .*no engine '{way}x'.*one of: {', '.join(sorted(ENGINES))}"):
        make_engine(cfg, choose("cpu"), Ranks())


# ---------------------------------------------------------------- steps


def by_hand(steps: int, max_norm: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training, written as anybody would: mean loss, clip, AdamW, cosine."""
    family = TinyFamily()
    root = family.load().root.train()
    body = [p for n, p in root.named_parameters() if n.startswith("blocks.")]
    rest = [p for n, p in root.named_parameters() if not n.startswith("blocks.")]
    optimizer = torch.optim.AdamW(
        [{"params": body, "lr": 1e-3}, {"params": rest, "lr": 5e-4, "weight_decay": 0.1}], fused=True
    )
    schedule = make_schedule(config().optimizer, optimizer, 20)
    losses = []
    for step in range(steps):
        batch = tiny_step(step, 8)[0]
        x, noise, t = batch.features["pixels"], batch.draws["noise"], batch.draws["timestep"]
        share = (t / 1000)[:, None, None, None]
        loss = (root((1 - share) * x + share * noise, t, {}) - x).square().flatten(1).mean(1).sum() / 8
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(root.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in root.named_parameters()}


@pytest.mark.flags("max_grad_norm")
@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_it_is_the_loop_that_one_would_write(make: Build, max_norm: float) -> None:
    engine = make({"max_grad_norm": max_norm})
    losses, expected = by_hand(8, max_norm)
    assert run(engine, 0, 8) == losses
    assert equal(weights(engine), expected)


def test_stats_are_the_global_means_and_the_norm_before_clipping(make: Build) -> None:
    free, clipped = (make({"max_grad_norm": norm}, TinyFamily(terms=2)) for norm in (0.0, 1e-3))
    a, b = (engine.step(tiny_step(0, 8), COUNTS) for engine in (free, clipped))
    assert a.sums.keys() == {"square", "absolute", "loss"}
    assert float(a.sums["loss"]) == pytest.approx(float(a.sums["square"] + a.sums["absolute"]))
    assert float(a.grad_norm) == float(b.grad_norm) > 1e-2
    assert float(a.skipped) == 0.0
    assert a.lrs == {"body": 0.0, "rest": 0.0}  # the rates of THIS step: warm-up starts at 0
    assert free.step(tiny_step(1, 8), COUNTS).lrs == {"body": 5e-4, "rest": 2.5e-4}


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_changes_nothing_but_rounding(make: Build, accumulation: int) -> None:
    whole, parts = make(), make()
    assert run(parts, 0, 20, accumulation) == pytest.approx(run(whole, 0, 20), rel=1e-6)
    for name, tensor in weights(parts).items():
        assert (tensor - weights(whole)[name]).abs().max() < 1e-3


def test_an_idle_micro_batch_counts_nothing(make: Build) -> None:
    """What another rank's is on a rank that has none: every engine runs it, for the others' sake."""
    plain, beside = make(), make()
    for step in range(6):
        idle = replace(tiny_batch([1000 + step]), idle=True)
        a, b = (engine.step(micro, COUNTS) for engine, micro in (
            (plain, tiny_step(step, 8)), (beside, [*tiny_step(step, 8), idle])
        ))  # fmt: skip
        assert float(b.sums["loss"]) == float(a.sums["loss"]) and float(b.grad_norm) == float(a.grad_norm)
    assert equal(weights(beside), weights(plain))


@pytest.mark.flags("mixed_precision")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_keeps_fp32_masters_and_stays_near(make: Build, precision: str) -> None:
    mixed, full = make({"mixed_precision": precision}), make()
    assert run(mixed, 0, 10) == pytest.approx(run(full, 0, 10), rel=2e-2)
    assert {p.dtype for _, p, _ in mixed.shards()} == {torch.float32}


def test_dropout_is_of_the_step_not_of_the_process(make: Build) -> None:
    family = TinyFamily(dropout=0.5)
    engine, other = make(family=family), make(family=family)
    torch.manual_seed(99)
    run(engine, 0, 2)
    torch.manual_seed(100)
    assert run(other, 0, 2) and equal(weights(engine), weights(other))
    for rate in (0.0, 0.5):  # the same batch twice, and nothing learnt between
        still = make(family=TinyFamily(lr=0.0, dropout=rate))
        first, second = (float(still.step(tiny_step(0, 8), COUNTS).sums["loss"]) for _ in range(2))
        assert (first == second) == (rate == 0.0)


# ---------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("value", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "torch.optim.SGD"])
def test_what_is_not_finite_never_reaches_the_weights(
    make: Build, value: float, precision: str, optimizer: str
) -> None:
    engine, other = (make({"mixed_precision": precision}, type=optimizer) for _ in range(2))
    run(engine, 0, 3)
    run(other, 0, 3)
    before = weights(engine)
    scale = engine._scaler.get_scale() if engine._scaler else 0.0
    stats = engine.step(spoilt(3, value), COUNTS)
    assert float(stats.skipped) == 1.0 and equal(weights(engine), before)
    if engine._scaler and other._scaler:
        assert engine._scaler.get_scale() == scale / 2
        other._scaler.load_state_dict(engine._scaler.state_dict())
    other.schedule.step()  # the schedule goes on, as the data does
    other.position += 1
    assert run(engine, 4, 6) == run(other, 4, 6) and equal(weights(engine), weights(other))


def test_a_loss_that_overflows_alone_is_skipped_too(make: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite loss whose gradient is finite: d/dx of (x + inf) is 1."""
    engine = make()
    real = engine.family.loss_sums
    monkeypatch.setattr(engine.family, "loss_sums", lambda *a: {k: v + float("inf") for k, v in real(*a).items()})
    before = weights(engine)
    stats = engine.step(tiny_step(0, 8), COUNTS)
    assert float(stats.skipped) == 1.0 and equal(weights(engine), before)


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion", "SGDNesterov"])
def test_it_goes_on_bit_by_bit_and_native_reads_its_state_as_it_reads_natives(
    way: str, make: Build, optimizer: str, tmp_path: Path
) -> None:
    rough = TinyFamily(dropout=0.2, statistics=True)
    straight, resumed = make(family=rough, type=optimizer), make(family=rough, type=optimizer)
    native, back = (built(config({"engine": "native"}, type=optimizer), rough) for _ in range(2))
    assert losses_of(straight, 4) == losses_of(native, 4)
    own, theirs = saved(straight, tmp_path / way), saved(native, tmp_path / "natives")
    assert json.loads((own / "engine.json").read_text())["engine"] == way
    expected = losses_of(straight, 4)
    losses_of(resumed, 2)  # what it had before does not matter
    for engine, folder in ((resumed, own), (resumed, theirs), (back, own)):
        engine.restore(folder)
        assert losses_of(engine, 4) == expected and equal(weights(engine), weights(straight))


def test_a_state_from_before_the_first_step_is_taken_up(make: Build, tmp_path: Path) -> None:
    state, straight = saved(built(), tmp_path), built()
    engine = make(family=TinyFamily(seed=9))
    engine.restore(state)
    assert losses_of(engine, 3) == losses_of(straight, 3)


def test_a_snapshot_owns_its_memory(make: Build, tmp_path: Path) -> None:
    engine = make()
    run(engine, 0, 3)
    saved(engine, tmp_path / "at once")
    snapshot = engine.snapshot()
    run(engine, 3, 6)
    (tmp_path / "later").mkdir()
    snapshot.write(tmp_path / "later")
    for path in (tmp_path / "at once").iterdir():
        assert path.read_bytes() == (tmp_path / "later" / path.name).read_bytes()
    engine.snapshot()
    with pytest.raises(RuntimeError, match=r"snapshot.* newer"):
        snapshot.write(tmp_path / "later")


@pytest.mark.parametrize(
    ("family", "optimizer", "words"),
    [
        (TinyFamily(blocks=4), {}, ["blocks.3.0.bias"]),
        (TinyFamily(blocks=2), {}, ["blocks.2.0.bias"]),
        (TinyFamily(width=8), {}, ["blocks.0.0.bias"]),
        (
            TinyFamily(),
            {"type": "torch.optim.SGD"},
            ["trained with torch.optim.adamw.AdamW", "torch.optim.sgd.SGD"],
        ),
    ],
)
def test_a_resume_folder_of_another_model_is_refused_and_changes_nothing(
    make: Build, family: TinyFamily, optimizer: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    mine = make()
    run(mine, 0, 2)
    saved(mine, tmp_path)
    engine = make(family=family, **optimizer)
    before = weights(engine)
    with pytest.raises(ConfigFault) as caught:
        engine.restore(tmp_path)
    assert all(word in str(caught.value) for word in [str(tmp_path), *words]), caught.value
    assert equal(weights(engine), before) and engine.position == 0
    with pytest.raises(ConfigFault, match=r"has no engine\.json"):
        engine.restore(tmp_path / "missing")


# ---------------------------------------------------------------- weights


def test_other_weights_for_a_while(make: Build, tmp_path: Path) -> None:
    engine, other = make(), make()
    run(engine, 0, 3)
    run(other, 0, 3)
    before = weights(engine)
    average = {name: torch.full_like(shard, 0.5) for name, shard, _ in engine.shards()}
    with pytest.raises(ZeroDivisionError), engine.swapped(average):
        assert all(bool((tensor == 0.5).all()) for _, tensor, _ in engine.shards())
        for action in (engine.snapshot, lambda: run(engine, 3, 4), lambda: engine.restore(tmp_path)):
            with pytest.raises(AssertionError, match="other weights"):
                action()
        raise ZeroDivisionError
    assert equal(weights(engine), before)
    assert run(engine, 3, 6) == run(other, 3, 6)
    assert equal(dict(engine.full_weights(average)), average)


def test_shards_say_where_they_lie_in_the_whole(make: Build) -> None:
    engine = make()
    run(engine, 0, 1)
    whole = {name: tensor.flatten() for name, tensor in engine.full_weights()}
    for name, shard, extent in engine.shards():
        assert extent.shape == tuple(engine.root.get_parameter(name).shape)
        assert torch.equal(shard.flatten(), whole[name][extent.offset : extent.offset + shard.numel()])


def test_evaluation_sums_without_dropout_and_leaves_no_trace(make: Build) -> None:
    family = TinyFamily(dropout=0.5, terms=2, statistics=True)
    engine, other = make(family=family), make(family=family)
    batches = [tiny_batch(range(3)), tiny_batch(range(3, 8))]
    run(engine, 0, 2)
    run(other, 0, 2)
    whole, pieces = engine.evaluate([tiny_batch(range(8))]), engine.evaluate(batches)
    assert whole.keys() == {"square", "absolute", "loss"}
    assert {k: float(v) for k, v in whole.items()} == pytest.approx({k: float(v) for k, v in pieces.items()}, rel=1e-6)
    assert {k: float(v) for k, v in engine.own_sums(batches).items()} == {k: float(v) for k, v in pieces.items()}
    assert {k: float(v) for k, v in engine.evaluate([]).items()} == {"square": 0.0, "absolute": 0.0, "loss": 0.0}
    inputs = family.inputs(batches[0], engine.parts)
    assert torch.equal(engine.predict(inputs), engine.predict(inputs)) and not engine.predict(inputs).requires_grad
    assert run(engine, 2, 5) == run(other, 2, 5)
    assert make().evaluate([]) == {}


def test_frozen_parameters_of_root_are_saved_and_not_trained(make: Build, tmp_path: Path) -> None:
    engine = make(family=Frozen())
    before = weights(engine)
    run(engine, 0, 3)
    after = weights(engine)
    assert {name for name in after if torch.equal(after[name], before[name])} == {"first.weight", "first.bias"}
    assert "first.weight" not in {name for name, _, _ in engine.shards()}
    saved(engine, tmp_path)
    other = make(family=Frozen(seed=1))  # other weights, the frozen ones too
    other.restore(tmp_path)
    assert equal(weights(other), after)


def test_parameters_that_take_no_part_are_named(make: Build) -> None:
    with pytest.raises(ConfigFault, match=r": extra\.weight, extra\.bias"):
        make(family=Spare()).step(tiny_step(0, 8), COUNTS)


def test_an_optimizer_that_wants_the_loss_again_is_refused(make: Build) -> None:
    family = TinyFamily()
    family.param_groups = lambda root, groups=family.param_groups: [_one(groups(root))]  # type: ignore[method-assign]
    with pytest.raises(ConfigFault, match=r"LBFGS evaluates .*loss"):
        make(family=family, type="torch.optim.LBFGS")


def _one(groups: list[Any]) -> Any:
    groups[0].named_params += groups[1].named_params
    return groups[0]
