"""When pictures are drawn, as docs/flags.md says it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from difftrain.config import TrainConfig
from difftrain.config.render.docs import flags_page
from difftrain.train.drawing import Drawing

EPOCH, LAST = 3, 10


class Noted(Drawing):
    """Note the steps instead of drawing."""

    def _draw(self, run: Any) -> None:
        self.drawn = [*getattr(self, "drawn", []), run.progress.step]


def drawn_at(tmp_path: Path, **sample: Any) -> list[int]:
    (tmp_path / "prompts.txt").write_text("a red star\n")
    run: Any = SimpleNamespace(progress=SimpleNamespace(step=0), begins_at=0)
    run.cfg = TrainConfig.model_validate({"sample": {"prompts": str(tmp_path / "prompts.txt"), **sample}})
    drawing = Noted(run, None)  # type: ignore[arg-type]
    for step in range(LAST + 1):
        run.progress.step, run.steps_left = step, LAST - step
        run.epoch_end = lambda step=step: 0 if step % EPOCH else step // EPOCH
        drawing.after_step(run) if step else drawing.before_training(run)
    return drawing.drawn


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
