"""When pictures are drawn, as docs/flags.md says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from difftrain.config import TrainConfig
from difftrain.config.render.docs import flags_page
from difftrain.train.drawing import Drawing
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
    said = " ".join(flags_page().split())
    assert "With both `--sample_every_n_steps` and `--sample_every_n_epochs` pictures are drawn at either" in said
    assert "wherever there are prompts at the last step too. A prompt without `--d` draws with `--seed`" in said
