"""The optimizers of kohya's list: which class each is, with whose defaults, and what is wrong with how it is asked for."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from typing import Any

import bitsandbytes.optim as bnb
import dadaptation
import lion_pytorch
import prodigyopt
import pytest
import schedulefree
import torch
import transformers
from dadaptation import experimental

from difftrain.config import hidden_imports
from difftrain.config.schema import names
from difftrain.config.schema.sections import OptimizerSection, TrainConfig
from difftrain.contracts import ConfigFault, Group
from difftrain.optim import averages, faults, make_optimizer, make_schedule
from difftrain.train.estimate.footprint import state_bytes

KOHYA: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW8bit": (bnb.AdamW8bit, {}),
    "PagedAdamW": (bnb.PagedAdamW, {}),
    "PagedAdamW8bit": (bnb.PagedAdamW8bit, {}),
    "PagedAdamW32bit": (bnb.PagedAdamW32bit, {}),
    "Lion": (lion_pytorch.Lion, {}),
    "Lion8bit": (bnb.Lion8bit, {}),
    "PagedLion8bit": (bnb.PagedLion8bit, {}),
    "SGDNesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGDNesterov8bit": (bnb.SGD8bit, {"momentum": 0.9, "nesterov": True}),
    "DAdaptation": (experimental.DAdaptAdamPreprint, {}),
    "DAdaptAdamPreprint": (experimental.DAdaptAdamPreprint, {}),
    "DAdaptAdaGrad": (dadaptation.DAdaptAdaGrad, {}),
    "DAdaptAdam": (dadaptation.DAdaptAdam, {}),
    "DAdaptAdan": (dadaptation.DAdaptAdan, {}),
    "DAdaptAdanIP": (experimental.DAdaptAdanIP, {}),
    "DAdaptLion": (dadaptation.DAdaptLion, {}),
    "DAdaptSGD": (dadaptation.DAdaptSGD, {}),
    "Prodigy": (prodigyopt.Prodigy, {}),
    "Adafactor": (transformers.optimization.Adafactor, {"lr": None, "relative_step": True}),
    "RAdamScheduleFree": (schedulefree.RAdamScheduleFree, {}),
    "AdamWScheduleFree": (schedulefree.AdamWScheduleFree, {}),
    "SGDScheduleFree": (schedulefree.SGDScheduleFree, {}),
    "oss": (torch.optim.AdamW, {}),
}


def group(lr: float = 1.0, name: str = "g") -> Group:
    torch.manual_seed(0)
    return Group(name, [(f"{name}.w", torch.nn.Parameter(torch.randn(65, 64)))], lr)


def train(optimizer: torch.optim.Optimizer, steps: int = 6) -> torch.Tensor:
    weight = optimizer.param_groups[0]["params"][0]
    for step in range(steps):
        weight.grad = torch.sin(weight.detach() * (step + 1))
        optimizer.step()
    return weight.detach()


def test_the_list_is_kohyas() -> None:
    assert set(KOHYA) == set(names.OPTIMIZERS) - {*names.ASCEND, *names.OURS} and len(KOHYA) == 24


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.flags("optimizer_type", "learning_rate")
@pytest.mark.parametrize("name", KOHYA)
def test_each_is_the_class_that_kohya_takes_with_its_own_defaults(name: str) -> None:
    kind, ours = KOHYA[name]
    section = OptimizerSection(type=name, learning_rate=0.5)
    made = make_optimizer(section, [group(0.5)], fused_ok=False)
    assert type(made) is kind
    weight = group().named_params[0][1]
    theirs = kind([weight], **{"lr": 0.5, **ours})
    if averages(theirs):
        theirs.train()
    if ours.get("relative_step"):  # group rates are the schedule's, and read by nobody
        make_schedule(section, made, 10)
    before = weight.detach().clone()
    assert torch.equal(train(made), train(theirs))
    assert name in names.ADAPTIVE or not torch.equal(weight, before)


@pytest.mark.parametrize(
    ("kind", "args", "told"),
    [
        ("SGDNesterov", ("nesterov=False",), r"SGDNesterov .*\bnesterov\b"),
        ("Lion", ("betas=(2,2)",), "Lion .*: "),
        ("Prodigy", ("d0=-1",), "Prodigy .*: Invalid d0"),
        ("Adafactor", ("relative_step=False", "lr=1"), r"Adafactor .*\blr\b"),
        ("SGDScheduleFree", ("momentum=1",), "Momentum must be between 0 and 1"),
        ("AdamW8bit", ("betas=2,2",), "AdamW8bit .*: Invalid beta"),
    ],
)
def test_arguments_that_are_refused(kind: str, args: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        make_optimizer(OptimizerSection(type=kind, args=args), [group()])
    assert re.search(told, str(caught.value))


def test_a_package_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dadaptation.experimental", None)
    monkeypatch.delattr(dadaptation, "experimental")
    (fault,) = faults(OptimizerSection(type="DAdaptAdam"))
    assert "package dadaptation" in fault.what


def test_a_device_that_bitsandbytes_does_not_know_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *_: Any) -> None:
        raise RuntimeError("no kernel image\nmore lines")

    monkeypatch.setattr(bnb.AdamW8bit, "step", broken)
    section = OptimizerSection(type="Lion8bit")
    with pytest.raises(ConfigFault, match=r"bitsandbytes [\d.]+ .*\bcpu\b: no kernel image \("):
        make_optimizer(section, [group()])
    assert faults(section) == []  # looking at the configuration touches no device


def test_a_bare_name_is_of_torchs_own() -> None:
    assert type(make_optimizer(OptimizerSection(type="rmsprop"), [group()])) is torch.optim.RMSprop
    there = {name for name in dir(torch.optim) if isinstance(kind := getattr(torch.optim, name), type)
             and issubclass(kind, torch.optim.Optimizer)}  # fmt: skip
    left_out = {"Optimizer", "LBFGS", "SparseAdam"} | set(names.OPTIMIZERS)
    assert set(names.TORCH_OPTIMIZERS) >= there - left_out
    assert set(names.TORCH_OPTIMIZERS) <= there


@pytest.mark.parametrize("name", names.ADAPTIVE)
def test_rates_of_their_own_are_refused_where_the_package_would_stop(name: str) -> None:
    groups = [group(1.0, "a"), group(0.5, "b")]
    section = OptimizerSection(type=name, learning_rate=1.0)
    if name in names.FIRST_RATE:
        optimizer = make_optimizer(section, groups)
    else:
        with pytest.raises(ConfigFault, match=rf"{name} .*one rate .* 0\.5, 1"):
            make_optimizer(section, groups)
        optimizer = KOHYA[name][0]([{"params": [p for _, p in g.named_params], "lr": g.lr} for g in groups])
    for table in optimizer.param_groups:
        table["params"][0].grad = torch.ones(65, 64)
    if name in names.FIRST_RATE:
        optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="Setting different lr values"):
            optimizer.step()


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize(
    ("name", "bytes_a_parameter"),
    [("AdamW", 8), ("SGDNesterov", 4), ("Adafactor", 8 * 256 / 65536), ("PagedAdamW8bit", 2.05), ("DAdaptAdan", 20),
     ("Muon", 6)],  # 4 of a matrix, 8 of what is none
)  # fmt: skip
def test_a_dry_run_can_tell_the_size_of_the_state(name: str, bytes_a_parameter: float) -> None:
    cfg = TrainConfig(optimizer=OptimizerSection(type=name, learning_rate=1.0))
    assert state_bytes(cfg, 0.5) == pytest.approx(bytes_a_parameter, rel=0.03)


def test_a_warm_up_from_zero_is_not_for_dadaptsgd() -> None:
    section = {"type": "DAdaptSGD", "learning_rate": 1.0, "scheduler": "linear"}
    (fault,) = faults(OptimizerSection(**section, warmup_steps=5))
    assert fault.where == "--lr_warmup_steps" and re.search(r"DAdaptSGD .*first rate, .* 0\b", fault.what)
    assert faults(OptimizerSection(**section)) == []
    assert faults(OptimizerSection(**{**section, "type": "DAdaptAdam"}, warmup_steps=5)) == []


# ---------------------------------------------------------------- Adafactor


@pytest.mark.flags("optimizer_args")
def test_adafactor_computes_its_own_rate_unless_it_is_told_not_to() -> None:
    own = make_optimizer(OptimizerSection(type="Adafactor", learning_rate=1e-3), [group(1e-3)])
    assert own.param_groups[0]["relative_step"] and own.param_groups[0]["lr"] is None
    forced = make_optimizer(
        OptimizerSection(type="Adafactor", args=("relative_step=False", "warmup_init=True")), [group()]
    )
    assert forced.param_groups[0]["relative_step"] and forced.param_groups[0]["warmup_init"]
    args = ("relative_step=False", "scale_parameter=False")
    given = make_optimizer(OptimizerSection(type="Adafactor", args=args), [group(1e-3)])
    assert given.param_groups[0]["lr"] == 1e-3 and not given.param_groups[0]["relative_step"]
    slow, fast = (
        train(make_optimizer(OptimizerSection(type="Adafactor", args=args), [group(rate)]), 1) for rate in (1e-4, 1e-3)
    )
    start = group().named_params[0][1].detach()
    torch.testing.assert_close(fast - start, 10 * (slow - start), rtol=1e-3, atol=5e-6)


def test_the_schedule_shows_what_transformers_shows() -> None:
    from transformers.optimization import AdafactorSchedule

    section = OptimizerSection(type="Adafactor", learning_rate=0.25)
    ours, theirs = (make_optimizer(section, [group(0.25)]) for _ in range(2))
    schedules = make_schedule(section, ours, 10), AdafactorSchedule(theirs, 0.25)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0.25
    for _ in range(3):
        for optimizer, schedule in zip((ours, theirs), schedules):
            train(optimizer, 1)
            schedule.step()
        assert ours.param_groups[0]["lr"] == float(theirs.param_groups[0]["lr"]) != 0.25


# ---------------------------------------------------------------- the schedule-free wrapper


def test_around_sgd_it_is_the_packages_own() -> None:
    given = {"momentum": 0.8, "weight_decay_at_y": 0.1, "r": 1.0, "weight_lr_power": 1.5}
    weight = group().named_params[0][1]
    theirs = schedulefree.ScheduleFreeWrapper(torch.optim.SGD([weight], lr=0.1), **given)
    theirs.train()
    section = OptimizerSection(
        type="torch.optim.SGD",
        learning_rate=0.1,
        schedulefree_wrapper=True,
        schedulefree_wrapper_args=tuple(f"{key}={value}" for key, value in given.items()),
    )
    ours: Any = make_optimizer(section, [group(0.1)])
    for step in range(6):
        for optimizer in (ours, theirs):  # a rate that changes, as a warm-up does
            optimizer.param_groups[0]["lr"] = 0.1 * (step + 1) / 6
        assert torch.equal(train(ours, 1), train(theirs, 1))  # type: ignore[arg-type]
    ours.eval()
    theirs.eval()
    assert torch.equal(ours.param_groups[0]["params"][0], weight)
    ours.train()
    theirs.train()
    assert torch.equal(ours.param_groups[0]["params"][0], weight)


def test_around_adamw_it_averages_what_adamw_would_do() -> None:
    """With a constant rate x is the plain mean of z; the first gradient is taken at x = y = z."""
    section = OptimizerSection(learning_rate=1e-2, schedulefree_wrapper=True)
    ours: Any = make_optimizer(section, [group(1e-2)], fused_ok=False)
    weight = ours.param_groups[0]["params"][0]
    base = torch.optim.AdamW([group().named_params[0][1]], lr=1e-2)
    (z,) = base.param_groups[0]["params"]
    x = z.detach().clone()
    for step in range(5):
        y = 0.9 * x + 0.1 * z.detach()
        torch.testing.assert_close(weight.detach(), y)
        weight.grad = torch.sin(weight.detach() * (step + 1))
        z.grad = weight.grad.clone()
        ours.step()
        base.step()
        x += (z.detach() - x) / (step + 1)
    ours.eval()
    torch.testing.assert_close(weight.detach(), x)


def test_a_rate_of_zero_at_the_start_of_a_warm_up_counts_nothing() -> None:
    ours = make_optimizer(OptimizerSection(learning_rate=1e-2, schedulefree_wrapper=True), [group(1e-2)])
    before = group().named_params[0][1].detach()
    ours.param_groups[0]["lr"] = 0.0
    assert torch.equal(train(ours, 1), before)
    ours.param_groups[0]["lr"] = 1e-2
    assert not torch.equal(train(ours, 1), before)


@pytest.mark.parametrize("args", [("momentum=1.0",), ("momentun=0.9",), ("base=1",)])
def test_wrong_arguments_of_the_wrapper(args: tuple[str, ...]) -> None:
    section = OptimizerSection(schedulefree_wrapper=True, schedulefree_wrapper_args=args)
    assert [fault.where for fault in faults(section)] == ["--schedulefree_wrapper_args"]


@pytest.mark.flags("lr_scheduler", "lr_warmup_steps")
def test_schedule_free_keeps_its_rate_and_the_wrapper_follows_a_schedule() -> None:
    for section, rates in (
        (OptimizerSection(type="AdamWScheduleFree", scheduler="linear", warmup_steps=2), [1.0, 1.0, 1.0, 1.0]),
        (OptimizerSection(schedulefree_wrapper=True, scheduler="linear", warmup_steps=2), [0.0, 0.5, 1.0, 0.875]),
    ):
        section = section.model_copy(update={"learning_rate": 1.0})
        optimizer = make_optimizer(section, [group(1.0)])
        schedule = make_schedule(section, optimizer, 10)
        found = []
        for _ in rates:
            found.append(optimizer.param_groups[0]["lr"])
            train(optimizer, 1)
            schedule.step()
        assert found == rates


def test_a_package_that_is_held_back_comes_in_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers imports bitsandbytes wherever it finds it, in every process."""
    monkeypatch.setattr(hidden_imports, "WITHHELD", ("lion_pytorch",))
    monkeypatch.setattr(hidden_imports, "_IMPORTERS", ())
    monkeypatch.setattr(hidden_imports, "_hidden", set())
    monkeypatch.delitem(sys.modules, "lion_pytorch")
    hidden_imports.hold_back()
    assert find_spec("lion_pytorch") is None and hidden_imports.is_installed("lion_pytorch")
    with pytest.raises(ImportError):
        importlib.import_module("lion_pytorch")
    assert type(make_optimizer(OptimizerSection(type="Lion"), [group()])).__name__ == "Lion"
    hidden_imports.hold_back()  # what is imported stays
    assert find_spec("lion_pytorch") is not None
