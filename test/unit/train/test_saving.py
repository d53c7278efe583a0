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
from difftrain.checkpoint import STEPS
from difftrain.config.schema.sections import TrainConfig
from difftrain.distributed.ranks import Ranks
from difftrain.hub.uploads import Uploads
from difftrain.train.saving import Saving


def test_the_last_checkpoint_is_named_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise checkpoint.SaveFault("rank 0 could not write its part of it: No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    cfg = TrainConfig.model_validate({"save": {"state": True}})
    quiet: Any = lambda *_: None  # noqa: E731
    run: Any = SimpleNamespace(
        cfg=cfg, name="NAME", out=tmp_path, failed_saves=0, ranks=None, progress=SimpleNamespace(step=3),
        clock=SimpleNamespace(paused=lambda _: contextlib.nullcontext()), claim=SimpleNamespace(check=quiet),
        engine=SimpleNamespace(snapshot=quiet),
    )  # fmt: skip
    monkeypatch.setattr(Saving, "_meta", quiet)
    with pytest.raises(
        checkpoint.SaveFault,
        match=r"^checkpoint NAME-state was not written: .*No space left on device; .*--resume=auto goes on",
    ):
        Saving(run, SimpleNamespace(update_progress=quiet)).after_training(run)


def test_a_full_disk_stops_no_run_on_its_way_and_leaves_earlier_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a run directory, where a step and an epoch are due at once."""
    cfg = TrainConfig.model_validate({"save": {"naming": "steps", "every_n_steps": 4, "every_n_epochs": 1}})
    run: Any = SimpleNamespace(
        cfg=cfg, name="NAME", out=tmp_path, failed_saves=0, ranks=Ranks(), steps_left=4, epoch_end=lambda: 1,
        progress=SimpleNamespace(step=4, samples_seen=8), claim=SimpleNamespace(owned=True),
        clock=SimpleNamespace(paused=lambda _: contextlib.nullcontext()), uploads=Uploads(),
    )  # fmt: skip
    tried = []

    def full(_: Saving, __: Any, name: checkpoint.SaveName) -> None:
        tried.append(name.of(STEPS))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Saving, "_export", full)
    earlier = tmp_path / "step2"
    earlier.mkdir()
    with caplog.at_level("ERROR", "difftrain"):
        Saving(run, SimpleNamespace()).after_step(run)
    assert tried == ["step4", "epoch1"] and run.failed_saves == 2 and earlier.is_dir()
    assert all("No space left on device; earlier ones are untouched" in message for message in caplog.messages)
