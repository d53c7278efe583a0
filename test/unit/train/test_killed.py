"""A run directory whose run is killed while it saves: before each change of the folder, at a step or an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from difftrain import checkpoint
from difftrain.checkpoint import STEPS, RunRecord, SaveName
from difftrain.checkpoint.retain import export_is_whole
from difftrain.config.digest import digest
from difftrain.config.schema.sections import TrainConfig
from difftrain.distributed.ranks import Ranks
from difftrain.models.weights.writers import safetensors_writer
from difftrain.train.run_dir import resolve_run_directory
from difftrain.train.saving import _folder_for
from difftrain.train.session import open_session

ALONE = Ranks()
CALLS = ("rename", "replace", "mkdir", "rmdir", "unlink")


class Killed(BaseException):
    """Stand for SIGKILL: nothing more reaches the disk."""


def config(base: Path) -> TrainConfig:
    save = {"output_dir": str(base), "run_dirs": True, "naming": "steps", "resume": "latest"}
    return TrainConfig.model_validate({"save": save})


def saved(run: Path, step: int, kind: str) -> None:
    """Write a checkpoint and an export that is one file in a folder."""

    def write(into: Path) -> list[Path]:
        (into / "weights.bin").write_bytes(b"%d" % step)
        return [into / "weights.bin"]

    checkpoint.commit(run, f"global_step{step}", write, ALONE, {"step": step, "kind": kind})
    name = SaveName(kind, step if kind == "step" else 1).of(STEPS)
    tensor = torch.full((4,), float(step))
    with (
        _folder_for(run / name, True) as path,
        safetensors_writer(path.with_suffix(".safetensors"), {"w": (tensor.dtype, (4,))}) as writer,
    ):
        writer.write("w", tensor)


def dying(patch: pytest.MonkeyPatch, moment: int) -> None:
    """Let the process die before its n-th change of a folder, and let nothing happen afterwards."""
    left = [moment]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*args, **options)

        return call

    for name in CALLS:
        patch.setattr(Path, name, counted(getattr(Path, name)))


@pytest.mark.parametrize("kind", ["step", "epoch"])
def test_every_moment_of_a_kill_leaves_what_a_resume_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for moment in range(40):
        base = tmp_path / str(moment)
        run = base / "20260101_10-00-00"
        run.mkdir(parents=True)
        RunRecord(digest(config(base)), 1, "last", 8, naming="steps").begun(0, 1).write(run)
        saved(run, 4, "step")
        finished = True
        with monkeypatch.context() as patch:
            dying(patch, moment)
            try:
                saved(run, 8, kind)
            except Killed:
                finished = False
        cfg = resolve_run_directory(config(base), ALONE)
        assert cfg.output_dir == run
        with open_session(cfg, ALONE, drawn_seed=1) as start:
            assert start.checkpoint is not None and start.step in ((8,) if finished else (4, 8))
            checkpoint.verify(start.checkpoint)
            names = {path.name for path in run.iterdir()}
            exports = names & {"step8", "epoch1"}
            assert names - exports - {"global_step8"} == {".claim", "run.json", "global_step4", "step4"}, moment
            assert all(export_is_whole(run / name / "model.safetensors") for name in exports)
        if finished:
            assert moment > 5 and len(exports) == 1
            return
    raise AssertionError("never finished")
