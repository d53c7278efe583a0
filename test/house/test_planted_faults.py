"""The faults of test/drills/planted_faults.py can be planted: their lines are where it says, and so are their tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from drills.planted_faults import FAULTS, PlantedFault

TESTS = Path(__file__).parents[1]
LIBRARY = TESTS.parent / "library" / "difftrain"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_its_line_is_there_once_and_would_still_be_python(fault: PlantedFault) -> None:
    text = (LIBRARY / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.right) == 1, f"{fault.file} has {fault.right!r} {text.count(fault.right)} times"
    # a fault that cannot be imported is noticed by every test, and shows nothing
    planted = ast.parse(text.replace(fault.right, fault.wrong))
    assert ast.dump(planted) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_its_tests_are_there(fault: PlantedFault) -> None:
    words = list(fault.tests)
    chosen = words.pop(words.index("-k") + 1) if "-k" in words else ""
    paths = [TESTS / word for word in words if word != "-k"]
    assert paths and all(path.exists() for path in paths), fault.tests
    assert chosen in "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file()), chosen


def test_a_fault_is_named_once() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
