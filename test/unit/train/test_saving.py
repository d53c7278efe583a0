"""What is said where a run cannot save what it must."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from difftrain import checkpoint
from difftrain.config.schema.sections import TrainConfig
from difftrain.distributed.ranks import Ranks
from difftrain.hub.uploads import Uploads
from difftrain.train.saving import Saving
from difftrain.train.state import Position

CLOCK: Any = SimpleNamespace(paused=lambda _: contextlib.nullcontext())


def test_the_last_checkpoint_is_named_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise checkpoint.SaveFault("rank 0 could not write its part of it: No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    cfg = TrainConfig.model_validate({"save": {"state": True, "output_name": "NAME"}})
    quiet: Any = lambda *_: None  # noqa: E731
    model, meter = SimpleNamespace(engine=SimpleNamespace(snapshot=quiet)), SimpleNamespace(update_progress=quiet)
    saving = Saving(cfg, model, None, CLOCK, SimpleNamespace(check=quiet), meter, None, quiet)  # type: ignore[arg-type]
    with pytest.raises(
        checkpoint.SaveFault,
        match=r"^checkpoint NAME-state was not written: .*No space left on device; .*--resume=auto goes on",
    ):
        saving.after_training(Position(3))


def test_a_full_disk_stops_no_run_on_its_way_and_leaves_earlier_exports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a run directory, where a step and an epoch are due at once."""
    save = {"naming": "steps", "every_n_steps": 4, "every_n_epochs": 1, "output_dir": str(tmp_path)}
    tried = []

    def full(name: str, step: int) -> None:
        tried.append(name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    exports, claim = SimpleNamespace(write=full, uploads=Uploads()), SimpleNamespace(owned=True)
    model = SimpleNamespace(averages=SimpleNamespace(snapshots_at=2))
    saving = Saving(TrainConfig.model_validate({"save": save}), model, Ranks(), CLOCK, claim, None, exports, None)  # type: ignore[arg-type]
    earlier = tmp_path / "step2"
    earlier.mkdir()
    with caplog.at_level("ERROR", "difftrain"):
        saving.after_step(Position(4, 8, steps_left=4, epoch_end=1))
    assert tried == ["step4", "epoch1"] and saving.failed == 2 and earlier.is_dir()
    assert model.averages.snapshots_at is None
    assert all("No space left on device; earlier ones are untouched" in message for message in caplog.messages)
