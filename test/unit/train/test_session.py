"""How a session begins."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from difftrain import checkpoint
from difftrain.config.schema.sections import SampleSection, SaveSection, TrainConfig, TrainingSection
from difftrain.contracts import ConfigFault
from difftrain.distributed.ranks import Ranks
from difftrain.train.averages import snapshot_path
from difftrain.train.session import Session, check_length, check_same, open_session


def test_half_written_exports_and_snapshots_are_cleared_away(tmp_path: Path) -> None:
    whole = snapshot_path(tmp_path, 0.05, 2)
    torn = [each.with_name(f".{each.name}.0123abcd.tmp") for each in (whole, tmp_path / "NAME.safetensors")]
    whole.parent.mkdir()
    for path in (whole, *torn):
        path.write_bytes(b"x")
    with open_session(TrainConfig(save=SaveSection(output_dir=str(tmp_path))), Ranks(), drawn_seed=5) as start:
        assert start.checkpoint is None and start.cfg.training.seed == 5
        assert whole.exists() and not any(path.exists() for path in torn)


def test_data_that_changed_are_a_fault_or_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """--i_know_what_i_am_doing of train.py: a resume goes on in data that are not those of the checkpoint."""
    was: dict[str, Any] = {"family": "sdxl", "model": {}, "trained": [], "global_batch": 2, "plan": {}}
    now = {**was, "plan_digest": "b", "threads": 1, "world_size": 1}
    meta = {**was, "plan_digest": "a", "threads": 1, "world_size": 1}

    def start(**training: Any) -> Session:
        cfg = TrainConfig(training=TrainingSection(**training), save=SaveSection(run_dirs=True))
        return Session(cfg, SimpleNamespace(), SimpleNamespace(), None, meta, auto=True)  # type: ignore[arg-type]

    with pytest.raises(ConfigFault, match=r"data .*order .*--reset_dataloader"):
        check_same(start(), now)
    with caplog.at_level(logging.WARNING, "difftrain"):
        check_same(start(only_warn=True), now)
    assert re.search("data .*order", caplog.text) and [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_shorter_run_than_what_is_done_is_refused_but_may_draw(tmp_path: Path) -> None:
    def start(**sample: Any) -> Session:
        cfg = TrainConfig(sample=SampleSection(**sample), save=SaveSection(resume="x"))
        return Session(cfg, SimpleNamespace(), SimpleNamespace(), tmp_path, {"step": 12}, auto=False)  # type: ignore[arg-type]

    with pytest.raises(ConfigFault, match=r"step 12, .* 8 steps"):
        check_length(start(), 8)
    check_length(start(), 12)
    check_length(start(prompts="p.txt", test_only=True), 8)


@pytest.mark.parametrize(("launch", "acts"), [("a", False), ("b", True), ("", True)])
def test_a_reset_acts_once_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launch: str, acts: bool
) -> None:
    """torchrun starts its ranks anew with the command as it was typed; only a later command resets again."""

    def write(work: Path) -> list[Path]:
        (work / "weights").write_text("w")
        return [work / "weights"]

    meta = {"step": 4, "launch": ["a", "c"]}
    path = checkpoint.commit(tmp_path / "20260101_10-00-00", "global_step4", write, Ranks(), meta)
    monkeypatch.setattr("difftrain.train.run_dir.launcher", lambda: launch)
    save = {"reset_optimizer": True, "reset_dataloader": True, "run_dirs": True, "naming": "steps"}
    given = {"output_dir": str(path.parent), "resume": str(path)}
    with (
        caplog.at_level(logging.INFO, "difftrain"),
        open_session(TrainConfig(save=SaveSection(**save, **given)), Ranks(), drawn_seed=5) as start,
    ):
        assert start.cfg.save.reset_optimizer == start.cfg.save.reset_dataloader == acts
        assert start.record.sessions[-1]["launch"] == list(start.launch) == ([launch] if launch else [])
    assert ("--reset_dataloader, --reset_optimizer: was applied" in caplog.text) is not acts
