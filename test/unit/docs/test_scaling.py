"""The tables of docs/scaling.md are what the cost model computes, and its formulas are those of their authors."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

PLAN = runpy.run_path(str(Path(__file__).resolve().parents[3] / "benchmarks" / "scaling_plan.py"))
daly, goodput, young = PLAN["daly"], PLAN["goodput"], PLAN["young"]


def test_the_page_has_the_tables() -> None:
    page = PLAN["PAGE"].read_text(encoding="utf-8")
    assert PLAN["written"](page) == page, "python benchmarks/scaling_plan.py --write"
    assert "one in 50,677 hours" in page and math.isclose(16_384 * 54 * 24 / 419, PLAN["DEVICE_HOURS"], rel_tol=1e-5)


@pytest.mark.parametrize(("save_s", "between_s"), [(20.0, 3600.0 * 50), (2.0, 3600.0), (300.0, 3600.0 * 4)])
def test_the_interval_loses_least(save_s: float, between_s: float) -> None:
    """Daly's is the maximum of the goodput to three digits, Young's nearly."""
    candidates = [30.0 * 1.01**power for power in range(700)]
    best = max(candidates, key=lambda work: goodput(work, save_s, 600.0, between_s))
    assert daly(save_s, between_s) == pytest.approx(best, rel=0.012)
    assert young(save_s, between_s) == pytest.approx(best, rel=0.15)


def test_goodput_is_what_a_simulation_gives() -> None:
    """Failures at random, while working, saving and restarting: the share of the time that was not done again."""
    import random

    draw, between, work, save, restart = random.Random(0), 5000.0, 600.0, 30.0, 120.0
    kept = spent = 0.0
    left = draw.expovariate(1 / between)
    while kept < 3e6:
        need = work + save
        if left >= need:
            left, spent, kept = left - need, spent + need, kept + work
            continue
        spent += left
        while (left := draw.expovariate(1 / between)) < restart:
            spent += left
        left, spent = left - restart, spent + restart
    assert kept / spent == pytest.approx(goodput(work, save, restart, between), rel=0.01)
