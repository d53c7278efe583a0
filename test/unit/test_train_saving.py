"""What is said where a run cannot save what it must."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from difftrain import checkpoint
from difftrain.config.sections import TrainConfig
from difftrain.train.saving import Saving


def test_the_last_checkpoint_is_named_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise checkpoint.SaveFault("rank 0 could not write its part of it: No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    cfg = TrainConfig.model_validate({"save": {"state": True}})
    quiet: Any = lambda *_: None  # noqa: E731
    run: Any = SimpleNamespace(
        cfg=cfg, name="NAME", out=tmp_path, facts={}, ranks=None, progress=SimpleNamespace(step=3),
        clock=SimpleNamespace(paused=lambda _: contextlib.nullcontext()), claim=SimpleNamespace(check=quiet),
        meter=SimpleNamespace(settle=quiet), engine=SimpleNamespace(snapshot=quiet),
    )  # fmt: skip
    monkeypatch.setattr(Saving, "_meta", quiet)
    with pytest.raises(
        checkpoint.SaveFault,
        match=r"^checkpoint NAME-state was not written: .*No space left on device; .*--resume=auto goes on",
    ):
        Saving(run).after_training(run)
