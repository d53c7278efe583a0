"""The contract of every optimizer that has a name: learning, rates, arguments, faults, restarts and skipped updates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import COUNTS, OneRate, built, equal, run, saved, spoilt, weights

from difftrain.config.schema import names
from difftrain.config.schema.sections import OptimizerSection, TrainConfig, TrainingSection
from difftrain.contracts import ConfigFault, Group
from difftrain.engine import update as engine_update
from difftrain.engine.native import NativeEngine
from difftrain.optim import averages, faults, make_optimizer
from difftrain.optim.registry import REGISTRY
from difftrain.testing.family import tiny_step
from difftrain.train.estimate.footprint import state_bytes

NAMES = (*REGISTRY, *names.TORCH_OPTIMIZERS)
SHAPES = {"wide.weight": (64, 65), "last.bias": (7,)}  # from 4096 elements on there is state of 8 bits
WIDE = 128  # of the tiny family, for the same reason

pytestmark = [
    pytest.mark.parametrize("name", NAMES),
    pytest.mark.filterwarnings("ignore:Paged optimizers"),
    pytest.mark.flags("optimizer_type", "optimizer_args", "learning_rate"),
]


def section(name: str, rate: float = 1e-2, *args: str) -> OptimizerSection:
    """Name an optimizer and a rate: of those that estimate it, what they multiply their estimate by."""
    if name in names.ADAPTIVE:
        rate, args = 1.0, ("d0=1e-3", *args)
    return OptimizerSection(type=name, learning_rate=rate, args=args)


def group(rate: float, number: int = 0) -> Group:
    generator = torch.Generator().manual_seed(0)
    named = [
        (f"blocks.{number}.{each}", torch.nn.Parameter(torch.randn(shape, generator=generator)))
        for each, shape in SHAPES.items()
    ]
    return Group(f"g{number}", named, rate)


def made(of: OptimizerSection, *groups: Group) -> Any:
    """Make an optimizer. That of another machine's device is, without its kernels, torch's."""
    groups = groups or (group(of.learning_rate),)
    return make_optimizer(of, list(groups), fused_ok=of.type not in names.ASCEND)


def update(optimizer: Any, group: Group, goal: float = 0.5) -> None:
    """Make an update down a bowl that is lowest at `goal`."""
    for _, weight in group.named_params:
        weight.grad = weight.detach() - goal
    optimizer.step()


def values(group: Group) -> list[torch.Tensor]:
    return [weight.detach().clone() for _, weight in group.named_params]


def config(name: str, training: dict[str, Any] | None = None) -> TrainConfig:
    of = section(name, 1e-4 if "Lion" in name else 1e-3)
    return TrainConfig(training=TrainingSection(seed=3, **(training or {})), optimizer=of)


def engine(name: str) -> NativeEngine:
    cfg = config(name)
    family = OneRate(lr=cfg.optimizer.learning_rate, width=WIDE, blocks=1)
    return built(cfg, family, fused_ok=name not in names.ASCEND)


def state(engine: NativeEngine) -> dict[str, Any]:
    """Return copies of all tensors and numbers that an optimizer keeps of its parameters."""
    parameters = dict(engine.root.named_parameters())
    return {
        f"{name} {key}": value.clone() if torch.is_tensor(value) else value
        for name, parameter in parameters.items()
        for key, value in engine.optimizer.state.get(parameter, {}).items()
    }


# ---------------------------------------------------------------- names and arguments


def test_the_configuration_knows_it_in_any_case_and_checks_it_without_a_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(REGISTRY) == set(names.OPTIMIZERS)
    monkeypatch.setattr("difftrain.optim.builders.is_installed", lambda module: True)
    kinds = {type(made(section(spelt))) for spelt in (name, name.lower(), name.upper()) if name not in names.ASCEND}
    assert len(kinds) <= 1 and faults(section(name)) == []


def test_what_it_does_not_take_is_named_before_a_device_is_touched(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("difftrain.optim.builders.is_installed", lambda module: True)
    for words, found in (
        (("nonsense=1",), "takes no nonsense here"),
        (("lr=1",), "takes no lr here"),  # the flags' own
        (("nonsense",), "got 'nonsense'"),
        (("eps=tiny",), "eps=tiny is not"),
    ):
        (fault,) = faults(section(name, 1e-2, *words))
        assert fault.where == "--optimizer_args" and found in fault.what and fault.remedy
    if name != "Rprop":  # nothing decays there
        optimizer = made(section(name, 1e-2, "weight_decay=0.125"))
        assert {table["weight_decay"] for table in optimizer.param_groups} == {0.125}
    assert capsys.readouterr().out == "", "its package's words stay out of the output"


def test_a_package_that_not_everybody_has_is_named_where_it_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, pip = names.PACKAGES.get(name, ("", ""))
    assert type(made(section(name))).__module__.partition(".")[0] in {"difftrain", "torch", "transformers", module}
    if not module:
        return
    monkeypatch.setitem(sys.modules, module, None)
    assert find_spec(module) is None  # what the rule of the configuration asks
    (fault,) = faults(section(name))
    assert fault.where == "--optimizer_type" and pip in fault.what and fault.remedy == f"pip install {pip}"


# ---------------------------------------------------------------- updates


def test_it_learns_in_every_kind_of_weight(name: str) -> None:
    of = section(name)
    each = group(of.learning_rate)
    optimizer, before = made(of, each), values(each)
    for _ in range(100):
        update(optimizer, each)
    for (weight, _), start, end in zip(each.named_params, before, values(each)):
        assert (end - 0.5).square().sum() < 0.999 * (start - 0.5).square().sum(), weight


def test_every_group_goes_by_its_own_rate_or_two_are_refused(name: str) -> None:
    # it computes its own rate else, and rates of its own are bounded
    args = {"Adafactor": ("relative_step=False",), "Automagic": ("max_lr=0.1", "min_lr=1e-4", "lr_bump=1e-4")}.get(
        name, ()
    )
    slow, fast = group(1e-3, 0), group(1e-2, 1)
    if name in names.ADAPTIVE:
        one, two = group(1.0, 0), group(0.5, 1)
        if name not in names.FIRST_RATE:
            with pytest.raises(ConfigFault, match=r"one rate .* 0\.5, 1"):
                made(section(name), one, two)
        else:
            update(made(section(name), one, two), one)
        return
    together = made(section(name, 1e-2, *args), slow, fast)
    assert {table["name"]: table["lr"] for table in together.param_groups}.items() >= {"g0": 1e-3, "g1": 1e-2}.items()
    alone = []
    for rate in (1e-3, 1e-2):
        each = group(rate)
        optimizer = made(section(name, rate, *args), each)
        for _ in range(8):
            update(optimizer, each)
        alone.append(values(each))
    for _ in range(8):
        for _, weight in fast.named_params:
            weight.grad = weight.detach() - 0.5
        update(together, slow)
    for found, expected in zip((slow, fast), alone):
        assert all(torch.equal(a, b) for a, b in zip(values(found), expected))
    assert not any(torch.equal(a, b) for a, b in zip(*alone))


def test_three_steps_a_restart_and_three_more_are_six(name: str, tmp_path: Path) -> None:
    straight = engine(name)
    before = weights(straight)
    losses = run(straight, 0, 3)
    saved(straight, tmp_path)
    losses += run(straight, 3, 6)
    assert len(set(losses)) == 6 and not equal(weights(straight), before)
    resumed = engine(name)
    run(resumed, 7, 9)  # what it had before does not matter
    resumed.restore(tmp_path)
    assert run(resumed, 3, 6) == losses[3:] and equal(weights(resumed), weights(straight))
    assert equal_states(state(resumed), state(straight))
    for table, other in zip(straight.optimizer.param_groups, resumed.optimizer.param_groups):
        kept = table.keys() - {"params"}
        assert {key: table[key] for key in kept} == {key: other[key] for key in kept}
    trained = weights(straight)
    with straight.averaged_weights():
        assert equal(weights(straight), trained) != averages(straight.optimizer)
    assert equal(weights(straight), trained), "what is trained comes back bit by bit"


def equal_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    same: Callable[[Any, Any], bool] = lambda a, b: torch.equal(a, b) if torch.is_tensor(a) else bool(a == b)  # noqa: E731
    return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())


def test_a_gradient_that_is_not_finite_reaches_neither_weights_nor_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator: what reads a flag on the device is stepped with it, of anything else the host looks first."""
    monkeypatch.setattr(engine_update, "_looking_is_free", lambda tensor: False)
    one, other = engine(name), engine(name)
    run(one, 0, 2)
    run(other, 0, 2)
    before, kept = weights(one), state(one)
    assert float(one.step(spoilt(2, float("nan")), COUNTS).skipped) == 1.0
    assert equal(weights(one), before) and equal_states(state(one), kept)
    other.schedule.step()  # the schedule goes on, as the data does
    other.position += 1
    assert run(one, 3, 5) == run(other, 3, 5) and equal(weights(one), weights(other))


# ---------------------------------------------------------------- what others read of it


def test_a_dry_run_tells_the_size_of_its_state(name: str) -> None:
    trained = engine(name)
    run(trained, 0, 1)
    matrix = dict(trained.root.named_parameters())["blocks.0.1.weight"]
    kept = [each for each in trained.optimizer.state[matrix].values() if torch.is_tensor(each) and each.numel() > 1]
    found = sum(each.numel() * each.element_size() for each in kept) / matrix.numel()
    assert state_bytes(config(name)) == pytest.approx(found, abs=0.1)


def test_a_step_tells_the_rate_that_it_estimates_and_no_other(name: str) -> None:
    trained, is_adaptive = engine(name), name in names.ADAPTIVE
    told = [trained.step(tiny_step(0, 8), COUNTS).adapted_lr for _ in range(60 if is_adaptive else 2)]
    if not is_adaptive:
        assert told == [None, None]
        return
    rates = [float(d) for d in told if d is not None]
    assert len(rates) == 60 and sorted(rates) == rates
    d0 = pytest.approx(1e-3)  # with what the update was made, not what it has learnt since
    assert rates[0] == rates[1] == d0 and rates[-1] > 1.1e-3
    assert rates[-1] <= float(trained.optimizer.param_groups[0]["d"])
