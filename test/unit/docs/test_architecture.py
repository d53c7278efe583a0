"""docs/architecture.md: its layers are those of the layer test, and what it names exists."""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWINGS = re.findall(r"^```mermaid\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
NODES = sorted({label for drawing in DRAWINGS for label in re.findall(r'\["([^"<]+)', drawing)})


def test_the_table_of_layers_is_the_layer_tests() -> None:
    spec = importlib.util.spec_from_file_location("layers", ROOT / "test/house/test_layers.py")
    assert spec is not None and spec.loader is not None
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    rows = re.findall(r"^\| (\d) \| `(\w+)` \|", TEXT, re.MULTILINE)
    assert {room: int(layer) for layer, room in rows} == layers.LEVEL
    named = {("engine", "optim"), ("engine", "checkpoint"), ("models", "adapters")}
    assert named == layers.ALLOWED, "the exceptions are named on the page"


def test_there_are_two_drawings() -> None:
    assert len(DRAWINGS) == 2 and len(NODES) >= 30


@pytest.mark.parametrize("node", NODES)
def test_a_node_of_a_drawing_exists(node: str) -> None:
    module, _, name = node.partition(":")
    found = importlib.import_module(f"difftrain.{module}")
    if name:
        reduce(getattr, name.split("."), found)


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_the_edges_of_a_drawing_join_its_nodes(drawing: str) -> None:
    known = set(re.findall(r'(\w+)\["', drawing))
    body = re.sub(r'\["[^"]*"\]|\|[^|]*\|', "", drawing)
    ends = {end for line in body.splitlines() if "-->" in line for end in re.findall(r"\w+", line)}
    assert ends == known


def test_every_test_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test/[\w/]+\.py)`", TEXT))
    assert len(named) > 20
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
    promises = re.findall(r"^\| .*\| (`test/.*) \|$", TEXT, re.MULTILINE)
    assert len(promises) == 13, "every guarantee has its tests"
