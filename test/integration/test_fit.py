"""The table of what fits: every recipe by the memory of a device has its row, and a row is what the script finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHEAP = "sd3_light/24gb.toml"


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    """Load benchmarks/fit.py."""
    spec = importlib.util.spec_from_file_location("fit", ROOT / "benchmarks" / "fit.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def table() -> list[str]:
    """Return the lines of the committed table, which the page has between two marks."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    own = page.partition("<!-- table: ")[2].partition("<!-- end of the table -->")[0]
    return [line for line in own.splitlines() if line.startswith("| `")]


def rows() -> dict[str, list[str]]:
    """Return the cells of the committed table by recipe."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table()]
    return {row[0].strip("`").removeprefix("configs/"): row[1:] for row in cells}


def test_every_recipe_has_a_row_that_fits_and_its_line(fit: ModuleType) -> None:
    known = rows()
    assert list(known) == fit.recipes() and {name.partition("/")[0] for name in known} == {"sdxl", "sd3_light"}
    assert {fit.device_gib(name) for name in known} == {24, 32, 40, 64, 80}
    for name, (device, *_, needed) in known.items():
        assert device == f"{fit.device_gib(name)} GB" and float(needed) <= fit.device_gib(name), name
        assert f"\n# memory: {needed} GiB, estimated" in (ROOT / "configs" / name).read_text(encoding="utf-8")
        assert fit.configuration(name).training.gradient_checkpointing


def test_a_row_is_what_the_script_finds(fit: ModuleType) -> None:
    found = fit.row(CHEAP, fit.estimate(CHEAP))
    assert [cell.strip() for cell in found.split("|")[2:-1]] == rows()[CHEAP]


def test_the_readmes_have_the_same_numbers(fit: ModuleType) -> None:
    short = [fit.short(line) for line in table()]
    for readme in fit.SHORT:
        text = (ROOT / readme).read_text(encoding="utf-8")
        own = text.partition(fit.SHORT_BEGINS)[2].partition(fit.SHORT_ENDS)[0]
        assert [line for line in own.splitlines() if line.startswith("| `")] == short
