"""docs/adding/family.md shows the files of a family as they are, and names every file of the suite that runs for it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from difftrain.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]
NAME = "auraflow"
TEXT = (ROOT / "docs" / "adding" / "family.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|json)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
FILES = {
    0: f"library/difftrain/models/families/{NAME}.py",
    2: f"library/difftrain/models/sizes_shipped/{NAME}.tiny.json",
    3: f"test/support/family_oracles/{NAME}.py",
}


def test_the_page_has_the_blocks_that_it_speaks_of() -> None:
    assert [kind for kind, _ in BLOCKS] == ["python", "python", "json", "python"]
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    there = {path.stem for path in Path(__file__).parent.glob("test_family_*.py")}
    assert named == there, "the table names every file of the suite"


@pytest.mark.parametrize("place", FILES)
def test_a_block_is_the_file_that_the_page_names(place: int) -> None:
    assert f"`{FILES[place]}`" in TEXT
    assert BLOCKS[place][1] == (ROOT / FILES[place]).read_text(encoding="utf-8")


def test_the_row_is_that_of_the_table() -> None:
    table = (ROOT / "library" / "difftrain" / "models" / "registry.py").read_text(encoding="utf-8")
    assert textwrap.indent(BLOCKS[1][1], "    ") in table and NAME in FAMILIES
