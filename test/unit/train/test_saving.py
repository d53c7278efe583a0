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
from difftrain.train import checkpoints
from difftrain.train.saving import Exports, Saving, second_name
from difftrain.train.state import Position

CLOCK: Any = SimpleNamespace(paused=lambda _: contextlib.nullcontext())


def test_the_last_checkpoint_is_named_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise checkpoint.SaveFault("rank 0 could not write its part of it: No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    cfg = TrainConfig.model_validate({"save": {"state": True, "output_name": "NAME"}})
    quiet: Any = lambda *_: None  # noqa: E731
    model = SimpleNamespace(engine=SimpleNamespace(snapshot=quiet), averages=SimpleNamespace(snapshot=quiet))
    meter, exports = SimpleNamespace(update_progress=quiet), SimpleNamespace(uploads=None, notices=None)
    monkeypatch.setattr(checkpoints, "checkpoint_bytes", lambda _: 0)
    saving = Saving(cfg, model, Ranks(), CLOCK, SimpleNamespace(check=quiet), meter, exports, quiet)  # type: ignore[arg-type]
    with pytest.raises(
        checkpoint.SaveFault,
        match=r"^checkpoint NAME-state was .*written: .*No space left.*; .*--resume=auto",
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

    exports, claim = SimpleNamespace(write=full, uploads=Uploads(), notices=None), SimpleNamespace(owned=True)
    model = SimpleNamespace(averages=SimpleNamespace(snapshots_at=2))
    saving = Saving(TrainConfig.model_validate({"save": save}), model, Ranks(), CLOCK, claim, None, exports, None)  # type: ignore[arg-type]
    earlier = tmp_path / "step2"
    earlier.mkdir()
    with caplog.at_level("ERROR", "difftrain"):
        saving.after_step(Position(4, 8, steps_left=4, epoch_end=1))
    assert tried == ["step4", "epoch1"] and saving.failed == 2 and earlier.is_dir()
    assert model.averages.snapshots_at is None
    assert caplog.messages and all("No space" in message for message in caplog.messages)


@pytest.mark.parametrize("can_link", [True, False])
@pytest.mark.parametrize("layout", ["file", "folder"])
def test_a_second_name_takes_no_room_where_the_disk_can_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, can_link: bool
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not can_link:
        monkeypatch.setattr(os, "link", refused)
    source, target = tmp_path / "NAME-step4", tmp_path / "NAME"
    inside = Path("unet") / "weights" if layout == "folder" else Path()
    (source / inside).parent.mkdir(parents=True, exist_ok=True)
    (source / inside).write_text("new")
    (target / inside).parent.mkdir(parents=True, exist_ok=True)
    (target / inside).write_text("old")
    for _ in range(2):  # again, and nothing changes
        second_name(source, target)
        assert (target / inside).read_text() == "new"
        assert (target / inside).samefile(source / inside) is can_link
        assert sorted(path.name for path in tmp_path.iterdir()) == ["NAME", "NAME-step4"]


def test_the_last_step_is_exported_once(tmp_path: Path) -> None:
    """Under kohya's names a step that is saved anyway may be the end, too."""
    cfg = TrainConfig.model_validate({"save": {"output_dir": str(tmp_path)}})
    exports = Exports(cfg, None, Ranks(), Uploads(), {}, None)  # type: ignore[arg-type]
    gathered = []

    def jobs(name: str, step: int) -> Any:
        gathered.append(name)
        path = tmp_path / f"{name}.safetensors"
        path.write_text(f"step {step}")
        exports.newest[path] = path.stat().st_size
        return []

    exports._jobs = jobs  # type: ignore[method-assign]
    exports.write("NAME-step00000004", 4)
    exports.write("NAME-step00000008", 8)
    exports.write("NAME", 8)
    assert gathered == ["NAME-step00000004", "NAME-step00000008"]
    assert (tmp_path / "NAME.safetensors").samefile(tmp_path / "NAME-step00000008.safetensors")
    assert [path.name for path in exports.newest] == ["NAME.safetensors"]
    (tmp_path / "NAME.safetensors").unlink()
    exports.write("NAME-again", 8)
    assert gathered[-1] == "NAME-again", "a file that is gone is written"
