"""The contract of every schedule in the registry: a pure function of the update, from its warm-up to where it says it ends."""

from __future__ import annotations

import inspect
import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from difftrain.config.schema.names import SCHEDULERS
from difftrain.config.schema.rates import ADAFACTOR
from difftrain.config.schema.sections import OptimizerSection
from difftrain.contracts import ConfigFault
from difftrain.optim import factor_of, faults, make_schedule
from difftrain.optim.schedule import SCHEDULES

TOTAL, WARM_UP, FLOOR = 23, 5, 0.2
# what a schedule cannot do without
NEEDS: dict[str, dict[str, Any]] = {"piecewise_constant": {"scheduler_args": ("step_rules='1:4,0.5:9,0.1'",)}}
FLAGS = {"w": "warmup_steps", "d": "decay_steps", "floor": "min_lr_ratio", "power": "power", "cycles": "num_cycles"}

pytestmark = pytest.mark.parametrize("kind", SCHEDULES)


def section(kind: str, **fields: Any) -> OptimizerSection:
    """Name a schedule and give what it needs; every flag that it reads has a value other than its default."""
    given = {"warmup_steps": WARM_UP, "decay_steps": 7, "min_lr_ratio": FLOOR, "power": 2.0} | NEEDS.get(kind, {})
    return OptimizerSection(scheduler=kind, learning_rate=1e-3, **(given | fields))


def curve(kind: str, total: int = TOTAL, **fields: Any) -> list[float]:
    factor = factor_of(section(kind, **fields), total)
    return [factor(step) for step in range(total + 1)]


def reads(kind: str, flag: str) -> bool:
    """Whether the value of a flag reaches this schedule."""
    return flag in SCHEDULES[kind][1]


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=rates[0])


def walked(schedule: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    """Return the rates of every update, by group."""
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def test_the_configuration_knows_it(kind: str) -> None:
    assert kind in SCHEDULERS and {*SCHEDULERS} - {*SCHEDULES} == {ADAFACTOR}, "that one shows what Adafactor computes"
    assert faults(section(kind), TOTAL) == []


@pytest.mark.parametrize("warm_up", [0, WARM_UP])
def test_it_is_a_share_of_the_rate_at_every_update_and_beyond_the_end(kind: str, warm_up: int) -> None:
    factor = factor_of(section(kind, warmup_steps=warm_up), TOTAL)
    found = [factor(step) for step in range(2 * TOTAL)]
    assert all(math.isfinite(each) and 0.0 <= each <= 1.0 for each in found)
    assert max(found) == 1.0
    assert [factor(step) for step in reversed(range(2 * TOTAL))] == found[::-1], "a pure function of the update"


def test_a_warm_up_rises_to_the_rate_and_is_left_out_by_those_that_have_none(kind: str) -> None:
    found = curve(kind)
    if not reads(kind, "w"):
        assert found == curve(kind, warmup_steps=0)
        return
    start = FLOOR if kind == "warmup_stable_decay" else 0.0
    assert found[0] == start and found[WARM_UP] == 1.0
    assert all(before < after for before, after in pairwise(found[: WARM_UP + 1]))
    assert found == curve(kind, warmup_steps=WARM_UP / TOTAL + 1e-9), "a share of all updates is as many updates"
    assert curve(kind, warmup_steps=0)[0] == 1.0


def test_it_ends_where_it_says(kind: str) -> None:
    """What knows the number of updates comes down to its end with the last one; the others are the same of any number."""
    found = curve(kind)
    if not reads(kind, "n"):
        assert found == curve(kind, 2 * TOTAL)[: TOTAL + 1]
        return
    end = FLOOR if reads(kind, "floor") else 1e-7 / 1e-3 if kind == "polynomial" else 0.0
    assert found[TOTAL] == pytest.approx(end, abs=1e-12) == min(found[WARM_UP:])
    assert found[TOTAL - 1] > found[TOTAL] and found != curve(kind, 2 * TOTAL)[: TOTAL + 1]


def test_every_flag_that_it_reads_moves_it_and_no_other(kind: str) -> None:
    plain = curve(kind)
    for flag, field in FLAGS.items():
        value = getattr(section(kind), field)
        other = curve(kind, **{field: FLOOR / 2 if flag == "floor" else value + 1})
        assert (other != plain) == reads(kind, flag), field


def test_every_group_follows_with_a_rate_of_its_own(kind: str) -> None:
    rates, factor = (1e-3, 1e-5, 2e-5), factor_of(section(kind), TOTAL)
    optimizer = optimizer_of(*rates)
    found = walked(make_schedule(section(kind), optimizer, TOTAL), optimizer, TOTAL)
    assert found == [[rate * factor(step) for rate in rates] for step in range(TOTAL)]


def test_resumed_it_goes_on_bit_by_bit(kind: str) -> None:
    straight, first, second = (optimizer_of(1e-3, 1e-5) for _ in range(3))
    expected = walked(make_schedule(section(kind), straight, TOTAL), straight, TOTAL)
    schedule, again = (make_schedule(section(kind), each, TOTAL) for each in (first, second))
    walked(schedule, first, 8)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))  # plain numbers only
    second.load_state_dict(first.state_dict())
    assert walked(again, second, TOTAL - 8) == expected[8:]


def test_an_argument_that_it_does_not_take_is_named(kind: str) -> None:
    function, flags = SCHEDULES[kind]
    free = [name for name in inspect.signature(function).parameters if name not in flags]
    for word in ("nonsense", *flags):  # what the flags give is given by them alone
        (fault,) = faults(section(kind, scheduler_args=(f"{word}=1",)), TOTAL)
        assert fault.where == "--lr_scheduler_args" and f"{kind} takes no {word} here" in fault.what
        assert fault.remedy == f"it takes {', '.join(sorted(free)) or 'nothing'}"
    with pytest.raises(ConfigFault, match=f"got '{kind}s'"):
        make_schedule(section(kind).model_copy(update={"scheduler": f"{kind}s"}), optimizer_of(1e-3), TOTAL)
