"""No module imports another in a circle, inside functions and for type checkers either."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "library" / "difftrain"
HOUSE = runpy.run_path(str(ROOT / "benchmarks" / "house.py"))
circles, imports, modules = HOUSE["circles"], HOUSE["imports"], HOUSE["modules"]


def test_no_modules_import_one_another_in_a_circle() -> None:
    trees = modules(PACKAGE)
    graph = {name: {other for other in imports(tree, set(trees)) if other != name} for name, tree in trees.items()}
    assert len(graph) > 300 and any(graph.values())
    assert not circles(graph)


def test_the_rule_itself_bites() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
