"""What evaluation sets need, and what needs them."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import is_about

from difftrain.config import TrainConfig
from difftrain.config.rules.finding import check
from difftrain.config.rules.outputs import EVAL_RULES


def found(asked: set[str], *names: str, **fields: Any) -> tuple[list[str], list[str]]:
    sets = tuple({"name": name, "config": "held.toml"} for name in names)
    cfg = TrainConfig.model_validate({"eval": {"sets": sets, **fields}})
    faults, notes = check(cfg, EVAL_RULES, {f"eval.{name}" for name in asked}, set(), {})
    return [str(fault) for fault in faults], notes


def test_sets_of_their_own_names_are_sound() -> None:
    assert found({"every_n_steps", "kid"}, "held", "other", every_n_steps=2, kid=True) == ([], [])


@pytest.mark.parametrize(
    "field", ["every_n_steps", "every_n_epochs", "every_n_examples", "before_first_step", "batch_size"]
)
def test_published_files_say_how_often_before_they_name_a_set(field: str) -> None:
    faults, notes = found({field}, **{field: 1})
    assert not faults and len(notes) == 1 and is_about(notes[0], f"[eval] {field}", "eval_datasets")


def test_a_distance_needs_a_set_and_its_settings_need_it() -> None:
    faults, _ = found({"kid", "kid_steps"}, kid=True)
    assert len(faults) == 1 and is_about(faults[0], "[eval] kid", "eval_datasets")
    faults, _ = found({"kid_steps"}, "held", kid_steps=5)
    assert len(faults) == 1 and is_about(faults[0], "[eval] kid_steps", "kid = true")
    faults, _ = found({"kid", "kid_pictures"}, "held", kid=True, kid_pictures=19)
    assert len(faults) == 1 and is_about(faults[0], "[eval] kid_pictures", "20", "19")


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        (("a", "b", "a"), ["2", "'a'"]),
        ((" ",), ["name"]),
        (("train",), ["'train'", "metrics"]),
        (("loss/x",), ["'loss/x'", "metrics"]),
    ],
)
def test_names_are_their_own(names: tuple[str, ...], facts: list[str]) -> None:
    faults, _ = found(set(), *names)
    assert len(faults) == 1 and is_about(faults[0], "[eval] sets", *facts)
