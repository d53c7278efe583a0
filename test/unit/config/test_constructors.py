"""What optimizers and schedules take, read from their sources: the same that their classes say, before any of them is loaded."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import is_about, names

from difftrain.config.constructors import optimizer_takes, schedule_takes, signature, wrong_arguments
from difftrain.config.hidden_imports import is_installed
from difftrain.config.schema.names import ASCEND, OPTIMIZERS, PACKAGES, SCHEDULERS, TORCH_OPTIMIZERS
from difftrain.config.schema.sections import OptimizerSection
from difftrain.contracts import Group
from difftrain.optim import arguments, make_optimizer
from difftrain.optim.schedule import SCHEDULES

ROOT = Path(__file__).parents[3]
INSTALLED = [
    name
    for name in (*OPTIMIZERS, *TORCH_OPTIMIZERS)
    if name not in ASCEND and (name not in PACKAGES or is_installed(PACKAGES[name][0]))
]


@pytest.mark.parametrize("name", INSTALLED)
def test_optimizers_take_what_is_said_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def look(where: str, what: str, taker: Callable[..., Any], given: object, own: object) -> None:
        seen.update(taker=taker, own={*own, "self"})  # type: ignore[misc]

    monkeypatch.setattr(arguments, "check", look)
    group = Group("g", [("blocks.0.w", torch.nn.Parameter(torch.zeros(4, 4)))], 1.0)
    make_optimizer(OptimizerSection(type=name), [group], trial=False)
    taken = inspect.signature(seen["taker"]).parameters
    usual = {key: each.default for key, each in taken.items() if key not in seen["own"]}
    found = optimizer_takes(name)
    assert found is not None and found.keys() == usual.keys()
    assert {key: value for key, value in found.items() if value is not None}.items() <= usual.items()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_take_what_is_said_of_them(name: str) -> None:
    function, ours = SCHEDULES[name]
    takes = schedule_takes(OptimizerSection(scheduler=name))
    assert takes is not None and set(takes) == set(inspect.signature(function).parameters) - set(ours)
    assert name in SCHEDULERS


def test_what_cannot_be_told_is_left_to_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange_optimizers.py").write_text(
        "class Open:\n    def __init__(self, params, lr, **rest): ...\n\nMade = type('Made', (), {})\n"
        "class Closed(Open):\n    def __init__(self, params, lr=1, *, eps=1e-8): ...\n\nclass Child(Closed): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert optimizer_takes("strange_optimizers.Open") is None and optimizer_takes("strange_optimizers.Made") is None
    assert optimizer_takes("strange_optimizers.Nope") is None and optimizer_takes("no_such_package_x.Adam") is None
    assert list(optimizer_takes("strange_optimizers.Child") or ()) == ["eps"]
    assert "strange_optimizers" not in sys.modules
    assert signature("torch.optim.lr_scheduler.StepLR") is not None


@pytest.mark.parametrize(
    ("fields", "field", "facts"),
    [
        ({"args": ("beta=1",)}, "optimizer.args", ["AdamW", "beta", "betas"]),
        ({"args": ("lr=1",)}, "optimizer.args", ["AdamW", "no lr"]),
        ({"args": ("eps='small'",)}, "optimizer.args", ["AdamW's eps", "'small'"]),
        ({"args": ("betas=0.9",)}, "optimizer.args", ["AdamW's betas", "2 numbers", "0.9"]),
        ({"args": ("amsgrad='no'",)}, "optimizer.args", ["AdamW's amsgrad", "'no'"]),
        ({"type": "SGDNesterov", "args": ("nesterov=False",)}, "optimizer.args", ["SGDNesterov", "no nesterov"]),
        ({"type": "npufusedadamw", "args": ("fused=True",)}, "optimizer.args", ["npufusedadamw", "no fused"]),
        ({"type": "torch.optim.SGD", "args": ("momentun=0.9",)}, "optimizer.args", ["momentun", "momentum"]),
        (
            {"scheduler": "cosine", "scheduler_args": ("cycles=1",)},
            "optimizer.scheduler_args",
            ["cosine", "num_cycles"],
        ),
        ({"scheduler_args": ("x=1",)}, "optimizer.scheduler_args", ["constant", "no x", "none"]),
        (
            {"scheduler_type": "StepLR", "scheduler_args": ("gama=1",)},
            "optimizer.scheduler_args",
            ["StepLR", "gama", "gamma"],
        ),
        (
            {"schedulefree_wrapper": True, "schedulefree_wrapper_args": ("momentun=1",)},
            "optimizer.schedulefree_wrapper_args",
            ["momentun", "momentum"],
        ),
    ],
)
def test_what_is_not_taken(fields: dict[str, Any], field: str, facts: list[str]) -> None:
    ((where, what, remedy),) = wrong_arguments(OptimizerSection(**fields))
    assert where == field and names(f"{what} ({remedy})", *facts)


@pytest.mark.parametrize(
    "args", [("betas=[0.9, 0.99]", "eps=0"), ("weight_decay=None",), ("amsgrad=1",), ("eps=small", "eps"), ()]
)
def test_what_is_taken_or_another_rules_matter(args: tuple[str, ...]) -> None:
    assert not list(wrong_arguments(OptimizerSection(args=args)))


def test_both_doors_say_it_without_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, 'library')\n"
        "from difftrain.config.parse_flags import parse\n"
        "from difftrain.contracts.errors import ConfigFault\n"
        "try: parse(['--optimizer_type=Muon', '--optimizer_args', 'momentun=1', 'betas=1', '--seed=x'])\n"
        "except ConfigFault as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for facts in (
        ("--optimizer_args", "Muon", "momentum"),
        ("--optimizer_args", "Muon's betas", "2", "1"),
        ("--seed", "'x'"),
    ):
        assert any(is_about(line, *facts) for line in said.splitlines()), (facts, said)
    assert said.endswith("False\n")
