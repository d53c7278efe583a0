"""Schedules against kohya's curves and the libraries' own functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.optimization import get_piecewise_constant_schedule
from transformers import optimization as oracle

from difftrain.config.schema.sections import OptimizerSection
from difftrain.contracts import ConfigFault
from difftrain.optim import make_schedule
from difftrain.optim.schedule import SCHEDULES, factor_of, updates

KOHYA = json.loads((Path(__file__).parents[1] / "files" / "kohya_schedules.json").read_text())["schedules"]
FIELDS = {
    "lr_scheduler": "scheduler",
    "lr_warmup_steps": "warmup_steps",
    "lr_decay_steps": "decay_steps",
    "lr_scheduler_num_cycles": "num_cycles",
    "lr_scheduler_power": "power",
    "lr_scheduler_timescale": "timescale",
    "lr_scheduler_min_lr_ratio": "min_lr_ratio",
}


def _optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=rates[0]
    )


def _curve(schedule: Any, optimizer: torch.optim.Optimizer, steps: int, group: int = 0) -> list[float]:
    curve = []
    for _ in range(steps):
        curve.append(optimizer.param_groups[group]["lr"])
        optimizer.step()
        schedule.step()
    return curve


def _ours(section: OptimizerSection, total: int, steps: int | None = None) -> list[float]:
    optimizer = _optimizer(section.learning_rate)
    return _curve(make_schedule(section, optimizer, total), optimizer, steps or total)


@pytest.mark.flags(
    "lr_scheduler", "lr_warmup_steps", "lr_decay_steps", "lr_scheduler_num_cycles", "lr_scheduler_power",
    "lr_scheduler_timescale", "lr_scheduler_min_lr_ratio",
)  # fmt: skip
@pytest.mark.parametrize("case", KOHYA, ids=lambda case: f"{case['lr_scheduler']}-{case.get('lr_warmup_steps', '')}")
def test_curves_equal_kohya(case: dict[str, Any]) -> None:
    section = OptimizerSection(learning_rate=1.0, **{FIELDS[k]: v for k, v in case.items() if k in FIELDS})
    assert _ours(section, case["max_train_steps"]) == pytest.approx(case["lr"], rel=0, abs=1e-5)


N, LR = 23, 3e-4
TRANSFORMERS = {
    "constant": lambda o, w: oracle.get_constant_schedule(o),
    "constant_with_warmup": lambda o, w: oracle.get_constant_schedule_with_warmup(o, w),
    "linear": lambda o, w: oracle.get_linear_schedule_with_warmup(o, w, N),
    "cosine": lambda o, w: oracle.get_cosine_schedule_with_warmup(o, w, N),
    "cosine_with_restarts": lambda o, w: oracle.get_cosine_with_hard_restarts_schedule_with_warmup(o, w, N, 2),
    "polynomial": lambda o, w: oracle.get_polynomial_decay_schedule_with_warmup(o, w, N, power=2.0),
    "inverse_sqrt": lambda o, w: oracle.get_inverse_sqrt_schedule(o, w),
    "cosine_with_min_lr": lambda o, w: oracle.get_cosine_with_min_lr_schedule_with_warmup(
        o, w, N, 1.0, min_lr_rate=0.2
    ),
    "warmup_stable_decay": lambda o, w: oracle.get_wsd_schedule(o, w, 7, N, min_lr_ratio=0.2, num_cycles=1.0),
    "piecewise_constant": lambda o, w: get_piecewise_constant_schedule(o, "1:4,0.5:9,0.25:12,0.1"),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [5, 0])
def test_curves_equal_the_libraries_beyond_the_end(name: str, warmup: int) -> None:
    args = {"piecewise_constant": ("step_rules='1:4,0.5:9,0.25:12,0.1'",), "inverse_sqrt": ()}
    section = OptimizerSection(
        learning_rate=LR,
        scheduler=name,
        warmup_steps=0 if name in ("constant", "piecewise_constant") else warmup,
        decay_steps=7,
        num_cycles=2,
        power=2.0,
        timescale=None if warmup else 10_000,
        min_lr_ratio=0.2,
        scheduler_args=args.get(name, ()),
    )
    steps = N + 1 if name == "cosine_with_min_lr" else N + 4  # two whole cosines rise again after the end: not compared
    optimizer = _optimizer(LR)
    if name == "inverse_sqrt" and not warmup:
        theirs = _curve(oracle.get_inverse_sqrt_schedule(optimizer, 0, 10_000), optimizer, steps)
    else:
        theirs = _curve(TRANSFORMERS[name](optimizer, warmup), optimizer, steps)
    assert _ours(section, N, steps) == pytest.approx(theirs, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "args", "make"),
    [
        ("polynomial", ("lr_end=1e-5",), lambda o: oracle.get_polynomial_decay_schedule_with_warmup(o, 5, 23, 1e-5)),
        ("cosine", ("num_cycles=1.5",), lambda o: oracle.get_cosine_schedule_with_warmup(o, 5, 23, 1.5)),
        (
            "cosine_with_min_lr",
            ("min_lr=1e-5",),
            lambda o: oracle.get_cosine_with_min_lr_schedule_with_warmup(o, 5, 23, min_lr=1e-5),
        ),
        (
            "warmup_stable_decay",
            ("decay_type='1-sqrt'", "warmup_type='cosine'"),
            lambda o: oracle.get_wsd_schedule(o, 5, 7, 23, warmup_type="cosine", decay_type="1-sqrt"),
        ),
        (
            "warmup_stable_decay",
            ("decay_type='linear'", "warmup_type='1-sqrt'"),
            lambda o: oracle.get_wsd_schedule(o, 5, 7, 23, warmup_type="1-sqrt", decay_type="linear"),
        ),
    ],
)
def test_arguments_of_the_libraries_are_taken(name: str, args: tuple[str, ...], make: Any) -> None:
    section = OptimizerSection(learning_rate=LR, scheduler=name, warmup_steps=5, decay_steps=7, scheduler_args=args)
    optimizer = _optimizer(LR)
    assert _ours(section, 23, 26) == pytest.approx(_curve(make(optimizer), optimizer, 26), rel=1e-9, abs=1e-15)


@pytest.mark.flags("lr_warmup_steps", "lr_decay_steps")
def test_warm_up_and_decay_as_shares_are_kohyas_curve_too() -> None:
    (case,) = (case for case in KOHYA if case["lr_scheduler"] == "warmup_stable_decay")
    assert (case["lr_warmup_steps"], case["lr_decay_steps"], case["max_train_steps"]) == (3, 8, 20)
    section = OptimizerSection(
        learning_rate=1.0, scheduler="warmup_stable_decay", warmup_steps=0.15, decay_steps=0.4, min_lr_ratio=0.1
    )
    assert _ours(section, 20) == pytest.approx(case["lr"], rel=0, abs=1e-5)


def test_shares_and_counts() -> None:
    assert [updates(v, 200) for v in (0, 0.25, 0.999, 1.0, 7, 7.0)] == [0, 50, 199, 1, 7, 7]


@pytest.mark.flags("lr_scheduler_type", "lr_scheduler_args")
def test_any_class_by_name() -> None:
    for path in ("torch.optim.lr_scheduler.StepLR", "StepLR"):
        section = OptimizerSection(learning_rate=1.0, scheduler_type=path, scheduler_args=("step_size=3", "gamma=0.5"))
        assert _ours(section, 7) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"scheduler": "cosin"}, "--lr_scheduler: got 'cosin' (one of constant, "),
        ({"scheduler": "polynomial", "scheduler_args": ("lr_end",)}, "got 'lr_end' (write name=value"),
        ({"scheduler": "polynomial", "scheduler_args": ("lr_end=tiny",)}, "lr_end=tiny is not"),
        ({"scheduler": "polynomial", "learning_rate": 1e-8}, "not below --learning_rate=1e-08"),
        ({"scheduler": "cosine_with_min_lr"}, "needs --lr_scheduler_min_lr_ratio"),
        (
            {"scheduler": "warmup_stable_decay", "scheduler_args": ("decay_type='no'",)},
            "decay_type='no' (one of linear,",
        ),
        ({"scheduler": "piecewise_constant"}, "step_rules='' cannot"),
        ({"scheduler": "piecewise_constant", "scheduler_args": ("step_rules='1:a,2'",)}, "step_rules='1:a,2' cannot"),
        ({"scheduler_type": "no.such.Class"}, "no.such.Class cannot"),
        ({"scheduler_type": "torch.optim.lr_scheduler.NoSuch"}, "has no NoSuch"),
        ({"scheduler_type": "torch.optim.AdamW"}, "subclass of LRScheduler"),
        ({"scheduler_type": "ReduceLROnPlateau"}, "ReduceLROnPlateau "),
        (
            {"scheduler_type": "StepLR", "scheduler_args": ("step=3",)},
            "gamma, step_size",
        ),
        ({"scheduler_type": "StepLR", "scheduler_args": ("step_size=3", "last_epoch=2")}, "last_epoch"),
        ({"scheduler_type": "StepLR"}, "StepLR refuses them"),
    ],
)
def test_faults_say_what_would_be_right(fields: dict[str, Any], told: str) -> None:
    section = OptimizerSection(**{"learning_rate": 1e-4, **fields})
    with pytest.raises(ConfigFault) as caught:
        make_schedule(section, _optimizer(1e-4), 20)
    assert told in str(caught.value)


@pytest.mark.parametrize("kind", ["linear", "log"])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_warm_up_of_deepspeeds_is_its_own(name: str, kind: str) -> None:
    """The shares of the rate that DeepSpeed's class gives, update by update; its cosine is one update ahead."""
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    from difftrain.config.spellings.deepspeed import NAMED

    warm_up, total = 7, 23
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    settings = {} if name == "WarmupLR" else {"total_num_steps": total}
    settings |= {"cos_min_ratio": 0.25} if name == "WarmupCosineLR" else {"warmup_max_lr": 0.5}
    theirs = getattr(schedules, name)(optimizer, warmup_num_steps=warm_up, warmup_type=kind, **settings)
    section = OptimizerSection(
        scheduler=NAMED[name], warmup_steps=warm_up, min_lr_ratio=0.25, scheduler_args=(f"warmup_type='{kind}'",)
    )
    factor = factor_of(section, total)
    for step in range(total):
        theirs.step()  # its first step is update 0
        ahead = int(name == "WarmupCosineLR" and step >= warm_up)
        assert theirs.get_last_lr()[0] / 0.5 == pytest.approx(factor(step + ahead), abs=1e-12), step
