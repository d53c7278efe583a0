"""A fresh run that begins in the middle of the data: the same steps as a whole run's, under the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors import Door, losses, metrics

# an update below the last bit of every weight: they stand still, so that losses can be compared step by step
STILL = ("--learning_rate=1e-30", "--log_every=1")


@pytest.mark.flags("initial_step", "initial_epoch", "skip_until_initial_step")
def test_what_comes_before_the_initial_step_is_left_out(door: Door, tmp_path: Path) -> None:
    door.run(door.flags(tmp_path / "whole", *STILL, steps=10))
    out = tmp_path / "part"
    line = (*STILL, "--skip_until_initial_step", "--resume=auto")
    printed = door.run(door.flags(out, *line, "--initial_step=6", steps=10))
    assert "the first 6 steps " in printed
    assert [line["step"] for line in metrics(out)] == [7, 8, 9, 10]
    assert losses(out) == losses(tmp_path / "whole")[6:]
    assert metrics(out)[-1]["samples_seen"] == 8
    assert (out / "NAME-step00000008-state").is_dir() and not (out / "NAME-step00000004-state").exists()
    door.run(door.flags(tmp_path / "epoch", *STILL, "--skip_until_initial_step", "--initial_epoch=2", steps=8))
    skipped = metrics(tmp_path / "epoch")
    first = skipped[0]["step"]
    assert skipped[0]["epoch"] == 2 and metrics(tmp_path / "whole")[first - 2]["epoch"] == 1
    assert losses(tmp_path / "epoch") == losses(tmp_path / "whole")[first - 1 : 8]
    said = door.run(door.flags(tmp_path / "none", "--initial_step=10", steps=10), expect=2)
    assert "needs --skip_until_initial_step" in said and "below --max_train_steps, 10 of 10" in said
