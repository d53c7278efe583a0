"""When pictures are drawn, as docs/flags.md says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from difftrain.config import TrainConfig
from difftrain.config.render.docs import flags_page
from difftrain.train.drawing import Drawing, prompts_of
from difftrain.train.state import Position

EPOCH, LAST = 3, 10


def drawn_at(tmp_path: Path, **sample: Any) -> list[int]:
    (tmp_path / "prompts.txt").write_text("a red star\n")
    cfg = TrainConfig.model_validate({"sample": {"prompts": str(tmp_path / "prompts.txt"), **sample}})
    drawing, drawn = Drawing(cfg, *[None] * 4), []  # type: ignore[arg-type, var-annotated]
    drawing.draw = lambda at: drawn.append(at.step)  # type: ignore[method-assign]
    drawing.before_training(Position(0, at_start=True))
    for step in range(1, LAST + 1):
        drawing.after_step(Position(step, steps_left=LAST - step, epoch_end=None if step % EPOCH else step // EPOCH))
    return drawn


@pytest.mark.flags("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first")
@pytest.mark.parametrize(
    ("sample", "steps"),
    [
        ({}, [10]),
        ({"every_n_steps": 4}, [4, 8, 10]),
        ({"every_n_epochs": 2}, [6, 10]),
        ({"every_n_steps": 4, "every_n_epochs": 2}, [4, 6, 8, 10]),
        ({"every_n_steps": 5, "at_first": True}, [0, 5, 10]),
    ],
)
def test_steps_and_epochs_both_act_and_the_last_step_draws(
    tmp_path: Path, sample: dict[str, Any], steps: list[int]
) -> None:
    assert drawn_at(tmp_path, **sample) == steps
    # the page of flags says so too
    said = " ".join(flags_page().split())
    both = said.partition("With both `--sample_every_n_steps`")[2].partition(". ")[0]
    assert "`--sample_every_n_epochs`" in both and "either" in both and "last step" in both


def test_epochs_may_count_from_the_first(tmp_path: Path) -> None:
    assert drawn_at(tmp_path, every_n_epochs=2, from_first_epoch=True) == [3, 9, 10]
    assert drawn_at(tmp_path, every_n_epochs=5, from_first_epoch=True) == [3, 10]


def test_prompts_in_words_are_drawn_in_twenty_steps_at_the_runs_size(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red star --s 7\n")
    sample = {"texts": ("one", "two"), "prompts": str(tmp_path / "prompts.txt")}
    cfg = TrainConfig.model_validate({"sample": sample, "data": {"resolution": (96, 64)}})
    prompts = prompts_of(cfg).prompts
    assert [(each.prompt, each.sample_steps) for each in prompts] == [("one", 20), ("two", 20), ("a red star", 7)]
    assert (prompts[0].width, prompts[0].height) == (96, 64)
    texts = TrainConfig.model_validate({"sample": {"texts": ("one",)}})
    assert [each.prompt for each in prompts_of(texts).prompts] == ["one"]
