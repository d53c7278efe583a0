"""Optimizers by name: kohya's defaults, arguments, dotted classes, groups, and updates skipped on the device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from refusals import names

from difftrain.config.schema.sections import OptimizerSection
from difftrain.contracts import ConfigFault, Group
from difftrain.optim import announce, faults, inner, make_optimizer


def _groups(rates: tuple[float, ...] = (1e-3,), decay: float | None = None) -> list[Group]:
    torch.manual_seed(0)
    return [Group(f"g{i}", [(f"g{i}.w", torch.nn.Parameter(torch.randn(5, 3)))], r, decay) for i, r in enumerate(rates)]


def _train(optimizer: torch.optim.Optimizer, steps: int = 5) -> torch.Tensor:
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.sin(weight.detach() * (step + 1))
        optimizer.step()
    return torch.cat([w.detach().ravel() for w in weights])


@pytest.mark.parametrize("name", ["AdamW", "adamw", "oss", "OSS"])
def test_adamw_has_kohyas_defaults_and_the_fused_kernel(name: str) -> None:
    groups = _groups()
    optimizer = make_optimizer(OptimizerSection(type=name, learning_rate=1e-3), groups)
    assert type(optimizer) is torch.optim.AdamW and inner(optimizer) is optimizer
    settings = optimizer.defaults
    assert settings["betas"] == (0.9, 0.999) and settings["eps"] == 1e-8 and settings["weight_decay"] == 0.01
    assert settings["fused"] is True and settings["lr"] == 1e-3
    assert not make_optimizer(OptimizerSection(type=name), groups, fused_ok=False).defaults["fused"]


def test_the_fused_update_equals_the_textbook() -> None:
    got = _train(make_optimizer(OptimizerSection(learning_rate=1e-2), _groups((1e-2,))))
    weight = _groups((1e-2,))[0].named_params[0][1].detach().double()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 6):
        gradient = torch.sin(weight * step)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        weight = weight * (1 - 1e-2 * 0.01) - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    torch.testing.assert_close(got, weight.float().ravel(), rtol=1e-5, atol=1e-6)


def test_groups_keep_their_names_rates_and_decay() -> None:
    groups = _groups((1e-3, 1e-5, 2e-5), decay=0.3)
    optimizer = make_optimizer(OptimizerSection(learning_rate=1e-3, args=("weight_decay=0.2",)), groups)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("g0", 1e-3, 0.3),
        ("g1", 1e-5, 0.3),
        ("g2", 2e-5, 0.3),
    ]
    assert [g["params"][0] is group.named_params[0][1] for g, group in zip(optimizer.param_groups, groups)] == [
        True
    ] * 3
    optimizer = make_optimizer(OptimizerSection(args=("weight_decay=0.2",)), _groups())
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


def test_arguments_are_literals() -> None:
    args = ("betas=.9,.99", "eps=1e-6", "amsgrad=True", "weight_decay=0")
    settings = make_optimizer(OptimizerSection(args=args), _groups()).defaults
    assert settings["betas"] == (0.9, 0.99) and settings["eps"] == 1e-6
    assert settings["amsgrad"] is True and settings["weight_decay"] == 0
    assert make_optimizer(OptimizerSection(args=("foreach=True",)), _groups()).defaults["fused"] is None


def test_found_inf_skips_the_update_on_the_device() -> None:
    optimizer: Any = make_optimizer(OptimizerSection(learning_rate=1e-2), _groups((1e-2,)))
    _train(optimizer, 2)
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    state = {k: v.clone() for k, v in next(iter(optimizer.state.values())).items()}
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    _train(optimizer, 1)
    assert torch.equal(before, optimizer.param_groups[0]["params"][0])
    assert all(torch.equal(v, state[k]) for k, v in next(iter(optimizer.state.values())).items())
    optimizer.found_inf = torch.tensor(0.0)
    _train(optimizer, 1)
    assert not torch.equal(before, optimizer.param_groups[0]["params"][0])


def test_any_class_by_dotted_name() -> None:
    section = OptimizerSection(type="torch.optim.SGD", learning_rate=0.1, args=("momentum=0.9", "nesterov=True"))
    ours = make_optimizer(section, _groups((0.1,)))
    assert type(ours) is torch.optim.SGD
    weight = _groups((0.1,))[0].named_params[0][1]
    assert torch.equal(_train(ours), _train(torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=True)))


@pytest.mark.parametrize(
    ("kind", "args", "told"),
    [
        ("AdamX", (), r"--optimizer_type: got 'AdamX' \(.*AdamW, oss, "),
        ("AdamW", ("beta=.9",), r"AdamW .*\bbeta\b .*amsgrad, betas, "),
        ("oss", ("nope=1", "nada=2"), "oss .*nope, nada"),
        ("AdamW", ("betas=2,2",), "AdamW .*: Invalid beta parameter"),
        ("AdamW", ("eps",), r"got 'eps' \(.*name=value.*weight_decay=0\.01\)"),
        ("AdamW", ("eps=1e-8", "eps=1e-6"), r"\beps\b"),
        ("AdamW", ("eps=__import__('os')",), r"eps=__import__\('os'\)"),
        ("no_such_package.Adam", (), "no_such_package.Adam cannot"),
        ("torch.optim.Nope", (), "torch.optim has no Nope"),
        ("torch.nn.Linear", (), r"torch\.nn\.Linear is not .*Optimizer"),
        ("torch.optim.SGD", ("momentun=0.9",), r"torch\.optim\.SGD .*\bmomentun\b.* dampening,"),
        ("torch.optim.SGD", ("nesterov=True",), r"torch\.optim\.SGD .*: Nesterov momentum requires"),
    ],
)
def test_faults_say_what_would_be_right(kind: str, args: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        make_optimizer(OptimizerSection(type=kind, args=args), _groups())
    assert re.search(told, str(caught.value))


def test_every_bad_argument_is_told_at_once() -> None:
    with pytest.raises(ConfigFault) as caught:
        make_optimizer(OptimizerSection(args=("a", "b=", "c=1")), _groups())
    assert len(caught.value.faults) == 2


def test_faults_of_optimizer_and_schedule_are_found_together_without_a_device() -> None:
    assert faults(OptimizerSection()) == []
    assert faults(OptimizerSection(type="torch.optim.SGD", args=("momentum=0.9",), scheduler="cosine")) == []
    wrong = OptimizerSection(
        type="torch.optim.SGD", args=("momentun=0.9",), scheduler="linear", scheduler_args=("x=1",)
    )
    assert [fault.where for fault in faults(wrong)] == ["--optimizer_args", "--lr_scheduler_args"]


def test_adamw_of_torch_npu_is_for_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difftrain.optim.builders.is_installed", lambda module: True)
    section = OptimizerSection(type="npufusedadamw", learning_rate=1e-3, args=("weight_decay=0.1",))
    assert faults(section) == []
    with pytest.raises(ConfigFault, match=r"updates on NPUs alone, and .*run is on cpu"):
        make_optimizer(section, _groups())
    (fault,) = faults(OptimizerSection(type="NpuFusedAdamW", args=("fused=True",)))
    assert names(fault.what, "fused") and "betas" in fault.remedy


def test_a_choice_between_adamws_is_said_where_it_was_not_the_users() -> None:
    assert announce(OptimizerSection(type="adamw"), "because") == announce(OptimizerSection(type="oss"), "because")
    assert announce(OptimizerSection(), "because") == ["because"] and announce(OptimizerSection(), "") == []
    assert announce(OptimizerSection(args=("fused=False",)), "because") == []
    assert announce(OptimizerSection(type="Lion"), "because") == []
