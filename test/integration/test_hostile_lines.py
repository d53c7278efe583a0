"""Mutated recipes and command lines end with an exit code and a sentence: the same few of them each time.

Thousands are sent by test/drills/hostile.py.
"""

from __future__ import annotations

import mutated
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> mutated.Path:
    return mutated.prepared(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("kind", ["recipes", "lines"])
def test_nothing_ends_in_a_traceback_or_not_at_all(folder: mutated.Path, kind: str) -> None:
    cases = mutated.recipe_cases(1, 30, folder) if kind == "recipes" else mutated.line_cases(1, 30, folder)
    counts = mutated.counted(cases, folder)
    assert (counts.tracebacks, counts.hangs, counts.silent) == ([], [], []), str(counts)
    assert counts.codes.keys() <= {0, 2, 3} and counts.codes[2]
