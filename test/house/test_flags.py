"""Every flag that is offered has a test that shows what it changes: one that is marked with its name."""

from __future__ import annotations

import ast
from pathlib import Path

from parsed import parsed

from difftrain.config.schema.validate import choices_of
from difftrain.config.spellings.flags import FLAGS

ROOT = Path(__file__).parents[1]


def marked() -> set[str]:
    """Return the flags that tests are marked with, read from their text."""
    found: set[str] = set()
    for path in ROOT.rglob("test_*.py"):
        if "mark.flags" not in path.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) == "pytest.mark.flags":
                found |= {ast.literal_eval(word) for word in node.args}
    return found


def test_every_flag_that_is_offered_is_shown_to_act() -> None:
    found = marked()
    assert found <= set(FLAGS), f"no such flags: {sorted(found - set(FLAGS))}"
    offered = {flag.name for flag in FLAGS.values() if flag.status in ("offered", "nearest")}
    fixed = {name for name in offered if FLAGS[name].to and len(choices_of(FLAGS[name].to)) == 1}  # one value so far
    assert not offered - found - fixed, sorted(offered - found - fixed)
