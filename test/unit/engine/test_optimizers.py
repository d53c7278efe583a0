"""Optimizers through the engine: what their arguments and wrappers keep over a restart, and averages that leave no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import COUNTS, OneRate, equal, one_thread, run, saved, weights  # noqa: F401

from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault
from difftrain.engine.native import NativeEngine
from difftrain.testing.family import tiny_batch, tiny_step

HALF = {"full_precision": "bf16", "mixed_precision": "bf16"}
WIDE = 128  # matrices of 4096 elements and more, of which bitsandbytes keeps 8-bit state
ADAPTIVE = {"learning_rate": 1.0, "args": ("d0=1e-3",)}

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers")


def config(training: dict[str, Any] | None = None, **optimizer: Any) -> TrainConfig:
    return engines.config(training, **{"learning_rate": 1e-3, "scheduler": "constant", "warmup_steps": 0, **optimizer})


def built(cfg: TrainConfig) -> NativeEngine:
    return engines.built(cfg, OneRate(lr=cfg.optimizer.learning_rate, width=WIDE, blocks=1))


# beside those that have a name, with their defaults: test/contracts/test_optimizer.py
CASES = [
    {"type": "Adafactor", "args": ("relative_step=False", "scale_parameter=False")},
    {"type": "Adafactor", "args": ("warmup_init=True", "beta1=.9")},
    {"type": "Prodigy", **ADAPTIVE, "args": ("slice_p=7", "d0=1e-3")},
    {"type": "GenericOptim", "args": ("momentum_type='sm'", "rank=8", "update_proj_gap=2", "state_bits=8")},
    {"type": "GenericOptim", "args": ("second_moment_type='sn'", "subset_size=-1", "muon=True", "state_bits=8")},
    {"type": "GenericOptim", "args": ("second_moment_type='factored'", "betas=(0, 0.99)")},
    {"type": "GenericOptim", "args": ("adamuon=True", "cpu_offload=True")},
    {"type": "GenericOptim", "args": ("normuon=True", "state_bits=8")},
    {"type": "Automagic", "learning_rate": 1e-4, "scheduler": "cosine", "warmup_steps": 2},
    {"type": "AdamW8bitKahan", "args": ("stabilize=False",)},
    {"type": "AdamW", "schedulefree_wrapper": True},
    {"type": "AdamW8bit", "schedulefree_wrapper": True},
    {"type": "Prodigy", "schedulefree_wrapper": True, **ADAPTIVE},
    {"type": "torch.optim.SGD", "schedulefree_wrapper": True},
    {"type": "torch.optim.SGD", "args": ("nesterov=True", "momentum=0.9", "weight_decay=0.01")},
    {"type": "torch.optim.Adafactor", "scheduler": "cosine", "warmup_steps": 2},
    {"type": "bitsandbytes.optim.AdEMAMix8bit"},
]


@pytest.mark.flags("optimizer_type", "optimizer_args", "optimizer_schedulefree_wrapper")
@pytest.mark.parametrize("optimizer", CASES, ids=lambda each: " ".join([each["type"], *each.get("args", ())]))
def test_three_steps_a_restart_and_three_more_are_six(optimizer: dict[str, Any], tmp_path: Path) -> None:
    cfg = config(**optimizer)
    straight = built(cfg)
    before = weights(straight)
    losses = run(straight, 0, 3)
    saved(straight, tmp_path)
    losses += run(straight, 3, 6)
    assert len(set(losses)) == 6 and not equal(weights(straight), before)
    resumed = built(cfg)
    run(resumed, 7, 9)  # what it had before does not matter
    resumed.restore(tmp_path)
    assert run(resumed, 3, 6) == losses[3:]
    assert equal(weights(resumed), weights(straight))
    for group, other in zip(straight.optimizer.param_groups, resumed.optimizer.param_groups):
        kept = group.keys() - {"params"}
        assert {key: group[key] for key in kept} == {key: other[key] for key in kept}


def test_eight_bit_state_is_eight_bits_wide_in_the_checkpoint_too(tmp_path: Path) -> None:
    engine = built(config(type="PagedAdamW8bit"))
    run(engine, 0, 1)
    saved(engine, tmp_path)
    resumed = built(config(type="PagedAdamW8bit"))
    resumed.restore(tmp_path)
    for one in (engine, resumed):
        widths = {state["state1"].dtype for state in one.optimizer.state.values() if state["state1"].numel() >= 4096}
        assert widths == {torch.uint8}


class Paging(torch.optim.SGD):
    """Hand out its own buffers, as a paged optimizer of bitsandbytes does on a device."""

    is_paged = True

    def get_state_buffer(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros_like(parameter, dtype=dtype)
        buffer.is_paged = True  # type: ignore[attr-defined]
        return buffer


def test_paged_state_is_paged_again_after_a_restart() -> None:
    from difftrain.optim import page_again

    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = Paging([parameter])
    optimizer.state[parameter] = {"state1": torch.arange(3.0), "other": torch.ones(2)}
    page_again(optimizer, parameter)
    loaded = optimizer.state[parameter]
    assert (
        loaded["state1"].is_paged
        and loaded["state1"].tolist() == [0, 1, 2]
        and not hasattr(loaded["other"], "is_paged")
    )
    optimizer.is_paged = False
    optimizer.state[parameter]["state1"] = plain = torch.arange(3.0)
    page_again(optimizer, parameter)
    assert optimizer.state[parameter]["state1"] is plain


def test_state_keeps_its_own_width_where_weights_are_halves(tmp_path: Path) -> None:
    """transformers' Adafactor keeps fp32 state of bf16 weights; torch's load_state_dict would round it."""
    cfg = config({**HALF, "master_weights": "none"}, type="Adafactor", args=("beta1=0.9",))
    straight, resumed = built(cfg), built(cfg)
    losses = run(straight, 0, 3)
    saved(straight, tmp_path)
    losses += run(straight, 3, 6)
    resumed.restore(tmp_path)
    assert {v.dtype for state in resumed.optimizer.state.values() for k, v in state.items() if "exp" in k} == {
        torch.float32
    }
    assert run(resumed, 3, 6) == losses[3:] and equal(weights(resumed), weights(straight))


@pytest.mark.flags("master_weights")
@pytest.mark.parametrize(
    ("kept", "optimizer"),
    [
        ("stochastic", {"type": "Prodigy", **ADAPTIVE}),
        ("kahan", {"type": "Prodigy", **ADAPTIVE}),
        ("kahan", {"type": "AdamW8bitKahan"}),
        ("kahan", {"type": "GenericOptim", "args": ("state_bits=8",)}),
        ("stochastic", {"type": "Automagic", "learning_rate": 1e-4}),
    ],
    ids=lambda each: each if isinstance(each, str) else each["type"],
)
def test_a_run_over_weights_of_bf16_resumes(kept: str, optimizer: dict[str, Any], tmp_path: Path) -> None:
    """Also where nothing is kept beside them, and updates round by chance."""
    cfg = config({**HALF, "master_weights": kept}, **optimizer)
    straight, resumed = built(cfg), built(cfg)
    losses = run(straight, 0, 3)
    saved(straight, tmp_path)
    losses += run(straight, 3, 6)
    resumed.restore(tmp_path)
    assert run(resumed, 3, 6) == losses[3:] and equal(weights(resumed), weights(straight))
    assert len(set(losses)) == 6 and all(value.dtype == torch.bfloat16 for value in weights(straight).values())


def test_the_state_of_one_base_is_not_taken_for_anothers(tmp_path: Path) -> None:
    engine = built(config(schedulefree_wrapper=True))
    run(engine, 0, 1)
    saved(engine, tmp_path)
    others = ({}, {"type": "torch.optim.Adam", "schedulefree_wrapper": True})
    for optimizer, wanted in zip(others, (r"adamw\.AdamW", r"adam\.Adam")):
        told = rf"{tmp_path} .*schedule-free torch\.optim\.adamw\.AdamW, .*{wanted} \("
        with pytest.raises(ConfigFault, match=told):
            built(config(**optimizer)).restore(tmp_path)


# ---------------------------------------------------------------- averages


FREE = [
    {"type": "AdamWScheduleFree"},
    {"type": "RAdamScheduleFree"},
    {"type": "SGDScheduleFree", "learning_rate": 0.1},
    {"schedulefree_wrapper": True, "schedulefree_wrapper_args": ("momentum=0.95",)},
]


@pytest.mark.flags("optimizer_type", "schedulefree_wrapper_args")
@pytest.mark.parametrize("optimizer", FREE, ids=lambda each: each.get("type", "wrapper"))
def test_what_is_used_is_the_average_and_what_is_trained_comes_back(optimizer: dict[str, Any], tmp_path: Path) -> None:
    engine, other = built(config(**optimizer)), built(config(**optimizer))
    with engine.averaged_weights():
        first = weights(engine)
    assert equal(first, weights(engine))  # nothing is averaged yet
    run(engine, 0, 8)
    run(other, 0, 8)
    trained = weights(engine)
    with engine.averaged_weights():
        used, loss = weights(engine), engine.evaluate([tiny_batch(range(100, 108))])["loss"]
        with pytest.raises(AssertionError, match="other weights"):
            engine.snapshot()
    momentum = 0.95 if "schedulefree_wrapper" in optimizer else 0.9
    for name, parameter in engine.root.named_parameters():
        z = engine.optimizer.state[parameter]["z"]
        torch.testing.assert_close(used[name], trained[name] + (1 - 1 / momentum) * (z - trained[name]))
    assert not equal(used, trained) and loss != engine.evaluate([tiny_batch(range(100, 108))])["loss"]
    assert equal(weights(engine), trained)
    saved(engine, tmp_path)
    assert run(engine, 8, 12) == run(other, 8, 12) and equal(weights(engine), weights(other))
    resumed = built(config(**optimizer))
    resumed.restore(tmp_path)
    with resumed.averaged_weights():
        assert equal(weights(resumed), used)


@pytest.mark.parametrize("master", ["fp32", "kahan", "stochastic", "none"])
def test_half_weights_come_back_too(master: str) -> None:
    training = {**HALF, "master_weights": master}
    engine, other = (built(config(training, type="AdamWScheduleFree")) for _ in range(2))
    run(engine, 0, 4)
    run(other, 0, 4)
    trained = weights(engine)
    with engine.averaged_weights():
        assert not equal(weights(engine), trained)
    assert equal(weights(engine), trained)
    assert run(engine, 4, 7) == run(other, 4, 7)


def test_any_other_optimizer_has_nothing_to_settle() -> None:
    engine = built(config())
    run(engine, 0, 2)
    before = weights(engine)
    with engine.averaged_weights():
        assert equal(weights(engine), before)
        engine.snapshot()


# ---------------------------------------------------------------- rates


class Wandering(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that no number of steps brings back: it goes by what it was told meanwhile."""

    def __init__(self, optimizer: torch.optim.Optimizer, share: float = 0.5) -> None:
        self.share, self.told = share, 1.0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * self.told for base in self.base_lrs]


@pytest.mark.flags("lr_scheduler_type", "lr_scheduler_args")
def test_a_schedule_without_a_formula_comes_back_by_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.lr_scheduler, "Wandering", Wandering, raising=False)
    cfg = config(scheduler_type="Wandering", scheduler_args=("share=0.25",))
    straight, resumed = built(cfg), built(cfg)
    losses = run(straight, 0, 3)
    straight.schedule.told = 0.25
    losses += run(straight, 3, 5)
    saved(straight, tmp_path)
    losses += run(straight, 5, 8)
    resumed.restore(tmp_path)
    assert resumed.schedule.told == 0.25 and run(resumed, 5, 8) == losses[5:]
    assert equal(weights(resumed), weights(straight))
    # other arguments, or other rates: the user's new ones count, and the steps are made again
    for changed in ({"scheduler_args": ("share=0.5",)}, {"learning_rate": 2e-3}):
        other = built(config(**{"scheduler_type": "Wandering", "scheduler_args": ("share=0.25",), **changed}))
        other.restore(tmp_path)
        assert other.schedule.told == 1.0 and other.schedule.last_epoch == 5


@pytest.mark.flags("lr_scheduler")
def test_adafactors_schedule_shows_the_rate_that_it_computed() -> None:
    engine = built(config(type="Adafactor", learning_rate=0.5, scheduler="adafactor:0.5"))
    told = [engine.step(tiny_step(step, 8), COUNTS).lrs for step in range(4)]
    assert told[0] == {"body": 0.5, "rest": 0.5}
    group = engine.optimizer.param_groups[0]
    rms = group["params"][0].detach().square().mean().sqrt()
    now = engine.optimizer.param_groups[0]["lr"]
    assert now == pytest.approx(max(1e-3, float(rms)) * 1e-2, rel=0.05)  # scale times min(1e-2, 1/sqrt(step))
    assert told[1]["body"] != told[1]["rest"] and now != told[3]["body"]
