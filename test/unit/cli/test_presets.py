"""Presets: each fits the memory that it names, by the plan of its release; all of them nightly, one here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from difftrain.cli.recipes import shipped
from difftrain.train.estimate.footprint import GIB

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
IN_CI = "24gb/sd3"


def benchmark() -> Any:
    if (loaded := sys.modules.get("presets")) is not None:
        return loaded
    spec = importlib.util.spec_from_file_location("presets", BENCHMARKS / "presets.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["presets"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = [
    pytest.param(name, marks=() if name == IN_CI else pytest.mark.nightly) for name in benchmark().NAMES
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_fits_its_device_and_leaves_little_unused(name: str) -> None:
    plan = benchmark().plan(name)
    asked = plan.cfg.memory
    assert f"{asked.memory_gib:g}gb" == name.partition("/")[0] and plan.cfg.adapter.type == "lora"
    assert plan.total <= asked.memory_gib * GIB
    if asked.swap_blocks:  # not more blocks wait than are needed with a little to spare
        assert plan.total >= 0.9 * asked.memory_gib * GIB


def test_every_big_family_has_a_preset_of_every_size() -> None:
    recipes = shipped()
    for name in benchmark().NAMES:
        recipe = recipes[f"presets/{name}"]
        assert recipe.family == name.partition("/")[2] and [file.name for file in recipe.beside] == ["pictures.toml"]
    assert len(benchmark().NAMES) == 3 * len(benchmark().RELEASES)
