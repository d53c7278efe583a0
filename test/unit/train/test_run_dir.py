"""Where a run goes: a folder of its own, and the checkpoint that a resume names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import names

from difftrain import checkpoint
from difftrain.checkpoint import RunRecord
from difftrain.config.digest import digest
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault
from difftrain.distributed.ranks import Ranks
from difftrain.testing.threads import on_threads
from difftrain.train import run_dir
from difftrain.train.run_dir import as_submitted, describe_run_directory, resolve_run_directory, run_directory

ALONE = Ranks()
OLD, NEW = "20260101_10-00-00", "20260102_10-00-00"


def config(base: Path, resume: str | None = None, **sections: Any) -> TrainConfig:
    save = {"output_dir": str(base), "run_dirs": True, "naming": "steps", "resume": resume}
    return TrainConfig.model_validate({"save": save | sections.pop("save", {}), **sections})


def state(folder: Path, step: int, kind: str = "step", launch: Sequence[str] = ()) -> Path:
    """Commit a checkpoint of one small file."""

    def write(into: Path) -> list[Path]:
        (into / "weights.bin").write_bytes(b"w" * 10)
        return [into / "weights.bin"]

    return checkpoint.commit(folder, f"global_step{step}", write, ALONE, {"step": step, "kind": kind, "launch": launch})


def run_of(base: Path, name: str, *steps: int, cfg: TrainConfig | None = None) -> Path:
    """Make a run directory with checkpoints."""
    folder = base / name
    folder.mkdir(parents=True)
    record = RunRecord(digest(cfg or config(base)), 1, "last", 8, naming="steps").begun(0, 1)
    record.write(folder)
    for step in steps:
        state(folder, step)
    return folder


def where(cfg: TrainConfig) -> tuple[str, str | None]:
    """Return the run directory's name and the name of what it resumes from."""
    found = resolve_run_directory(cfg, ALONE)
    return found.output_dir.name, Path(found.save.resume).name if found.save.resume else None


def told(cfg: TrainConfig) -> str:
    """Return the fault as a user reads it."""
    with pytest.raises(ConfigFault) as caught:
        resolve_run_directory(cfg, ALONE)
    return str(caught.value)


def test_a_new_run_beside_an_unfinished_one_of_its_configuration_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path, training={"max_steps": 8})
    run_of(tmp_path, OLD, 4, cfg=cfg)
    with caplog.at_level("WARNING"):
        assert where(config(tmp_path, training={"max_steps": 9}))[1] is None
    assert not caplog.messages
    with caplog.at_level("WARNING"):
        name, resume = where(cfg)
    assert name != OLD and resume is None
    (line,) = caplog.messages
    assert names(line, str(tmp_path / OLD), f"--resume_from_checkpoint={OLD}", 4)


def test_a_run_gets_a_folder_named_by_the_time_and_two_at_once_get_two(tmp_path: Path) -> None:
    names = [where(config(tmp_path / "out"))[0] for _ in range(3)]
    assert len(set(names)) == 3 and all(re.fullmatch(r"\d{8}_\d\d-\d\d-\d\d", name) for name in names)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)


def test_without_run_directories_nothing_is_changed(tmp_path: Path) -> None:
    cfg = TrainConfig.model_validate({"save": {"output_dir": str(tmp_path)}})
    assert resolve_run_directory(cfg, ALONE) is cfg and as_submitted(cfg) is cfg and not any(tmp_path.iterdir())


def test_latest_is_the_newest_whole_checkpoint_of_the_newest_run_that_has_one(tmp_path: Path) -> None:
    run_of(tmp_path, OLD, 4, 12)
    newer = run_of(tmp_path, NEW, 4, 8)
    (tmp_path / "20260103_10-00-00").mkdir()  # ended before its first checkpoint
    (tmp_path / "zzz").mkdir()
    assert where(config(tmp_path, "latest")) == (NEW, "global_step8")
    (newer / "global_step8" / "weights.bin").write_bytes(b"torn")
    assert where(config(tmp_path, "latest")) == (NEW, "global_step4")
    (newer / "global_step4" / "weights.bin").unlink()
    assert where(config(tmp_path, "latest")) == (OLD, "global_step12")


def test_a_step_is_that_of_the_newest_run_that_has_it(tmp_path: Path) -> None:
    run_of(tmp_path, OLD, 4, 12)
    run_of(tmp_path, NEW, 4, 8)
    assert where(config(tmp_path, "4")) == (NEW, "global_step4")
    assert where(config(tmp_path, "12")) == (OLD, "global_step12")
    said = told(config(tmp_path, "7"))
    assert "--resume_from_checkpoint" in said and "step 7" in said
    assert f"{NEW}: 4, 8" in said and f"{OLD}: 4, 12" in said


def test_a_folder_is_a_run_or_a_checkpoint_by_path_or_by_name(tmp_path: Path) -> None:
    older = run_of(tmp_path, OLD, 4, 12)
    run_of(tmp_path, NEW, 4, 8)
    for given in (OLD, str(older), str(older / "global_step12"), f"{OLD}/global_step12"):
        assert where(config(tmp_path, given)) == (OLD, "global_step12")
    assert where(config(tmp_path, f"{OLD}/global_step4")) == (OLD, "global_step4")


def test_a_checkpoint_from_elsewhere_is_where_a_new_run_begins(tmp_path: Path) -> None:
    elsewhere = run_of(tmp_path / "a", OLD, 4)
    name, resume = where(config(tmp_path / "b", str(elsewhere)))
    assert name not in (OLD, NEW) and resume == "global_step4"
    assert (
        resolve_run_directory(config(tmp_path / "b", str(elsewhere / "global_step4")), ALONE).output_dir.parent
        == tmp_path / "b"
    )


def test_what_cannot_be_resumed_is_told_with_what_can(tmp_path: Path) -> None:
    assert re.search(rf"no run .*{tmp_path}", told(config(tmp_path, "latest")))
    run = run_of(tmp_path, OLD, 4)
    assert f"runs below {tmp_path}: {OLD}" in told(config(tmp_path, "nowhere"))
    (tmp_path / "other").mkdir()
    assert f"'{tmp_path / 'other'}'" in told(config(tmp_path, str(tmp_path / "other")))
    (tmp_path / NEW).symlink_to(tmp_path / "gone")
    assert where(config(tmp_path, "latest")) == (OLD, "global_step4")
    said = told(config(tmp_path / "new", str(tmp_path)))
    assert f"'{tmp_path}'" in said and f": {run}" in said
    (run / "global_step4" / "weights.bin").write_bytes(b"torn")
    assert re.search(rf"{run / 'global_step4'} .*weights\.bin", told(config(tmp_path, str(run / "global_step4"))))
    assert re.search(rf"no checkpoint .* {tmp_path} .*complete", told(config(tmp_path, "latest")))
    assert "step 4: " in told(config(tmp_path, "4"))


def test_a_name_that_is_two_folders_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path / "out", OLD, 4)
    run_of(tmp_path / "here", OLD, 4)
    monkeypatch.chdir(tmp_path / "here")
    assert "whole path" in told(config(tmp_path / "out", OLD))
    monkeypatch.chdir(tmp_path / "out")
    assert where(config(tmp_path / "out", OLD)) == (OLD, "global_step4")


def test_auto_goes_on_where_the_newest_run_is_this_one_and_not_done(tmp_path: Path) -> None:
    cfg = config(tmp_path, "auto", training={"max_steps": 8})
    first, resume = where(cfg)
    assert resume is None
    (tmp_path / first).rmdir()
    run_of(tmp_path, OLD, cfg=cfg)
    assert where(cfg) == (OLD, "auto")  # no checkpoint yet: the same folder, from the beginning
    state(tmp_path / OLD, 4)
    (tmp_path / NEW).mkdir()  # killed before it wrote down what it is
    assert where(cfg) == (OLD, "global_step4")
    other, resume = where(config(tmp_path, "auto", training={"max_steps": 9}))
    assert other != OLD and resume is None
    (tmp_path / other).rmdir()
    record = RunRecord.read(tmp_path / OLD)
    assert record is not None
    record.ended(8).write(tmp_path / OLD)
    assert where(cfg)[0] != OLD


def test_what_came_after_a_step_that_was_gone_back_to_is_not_gone_on_from(tmp_path: Path) -> None:
    folder = run_of(tmp_path, OLD, 4, 8)
    record = RunRecord.read(folder)
    assert record is not None
    later = {"at": "2999-01-01T00:00:00+00:00", "from_step": 4, "world_size": 1}
    replace(record, sessions=(*record.sessions, later)).write(folder)
    assert where(config(tmp_path, "latest")) == (OLD, "global_step4")
    assert where(config(tmp_path, "8")) == (OLD, "global_step8")  # asked for by its number


def test_one_look_at_a_checkpoint_leaves_its_run_alone(tmp_path: Path) -> None:
    run_of(tmp_path, OLD, 4)
    cfg = resolve_run_directory(config(tmp_path, "latest", sample={"test_only": True, "prompts": "p.txt"}), ALONE)
    assert cfg.output_dir.name != OLD and str(cfg.save.resume).endswith(f"{OLD}/global_step4")


def test_a_folder_in_which_nothing_came_about_is_taken_away(tmp_path: Path) -> None:
    for leaves in (True, False):
        with pytest.raises(KeyError), run_directory(config(tmp_path), ALONE) as cfg:
            with checkpoint.claim_together(cfg.output_dir, "", ALONE):
                pass
            if leaves:
                (cfg.output_dir / "rejected.jsonl").touch()
            raise KeyError
        assert cfg.output_dir.exists() == leaves


def test_an_output_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "--output.output_dir" in told(config(tmp_path / "file"))


def test_the_configuration_that_is_kept_begins_another_run(tmp_path: Path) -> None:
    run_of(tmp_path, OLD, 4)
    cfg = config(tmp_path, "latest", save={"reset_dataloader": True})
    assert as_submitted(resolve_run_directory(cfg, ALONE)) == config(tmp_path)
    away = config(tmp_path, "ann/runs/global_step4", hub={"resume": True})
    assert as_submitted(resolve_run_directory(away, ALONE)) == config(tmp_path)


def test_every_rank_hears_of_one_folder(tmp_path: Path) -> None:
    found = on_threads(3, lambda ranks: resolve_run_directory(config(tmp_path), ranks).output_dir, 1)  # type: ignore[arg-type]
    assert [path.parent for path in found] == [tmp_path] * 3 and len(set(found)) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("resume", [None, "latest", "4", OLD, "auto"])
def test_a_launch_that_torchrun_starts_anew_goes_on_from_what_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None
) -> None:
    cfg = config(tmp_path, resume)
    run_of(tmp_path, OLD, 4)
    record = RunRecord.read(tmp_path / OLD)
    assert record is not None
    began = replace(record.begun(4, 2, ["b", "c"]), config_digest=digest(cfg, 1))
    began.write(tmp_path / OLD)
    state(tmp_path / OLD, 6, launch=["b", "c"])
    (tmp_path / NEW).mkdir()
    (tmp_path / NEW / "run.json").write_text("of nobody's concern")
    monkeypatch.setattr(run_dir, "launch_of", lambda _: ("a", "b"))  # one machine's torchrun is another
    assert where(cfg) == (OLD, "global_step6")
    from_hub = resolve_run_directory(config(tmp_path, "ann/runs/global_step4", hub={"resume": True}), ALONE)
    assert str(from_hub.save.resume).endswith("global_step6") and not from_hub.hub.resume
    (tmp_path / NEW / "run.json").unlink()
    (tmp_path / OLD / "global_step6" / "weights.bin").unlink()
    monkeypatch.setattr(run_dir, "launch_of", lambda _: ("b",))
    name, found = where(cfg)
    assert (name == OLD, found) == ((True, "global_step4") if resume else (False, None))  # as the command says
    state(tmp_path / OLD, 6, launch=["b"])
    began.begun(6, 1, ["d"]).write(tmp_path / OLD)  # somebody has gone on with another command
    assert where(config(tmp_path))[0] != OLD


def test_a_dry_run_says_where_it_would_go_and_makes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert re.fullmatch(rf"run directory: a new .* {out}", describe_run_directory(config(out), 1)) and not out.exists()
    run_of(out, OLD, 4)
    assert re.fullmatch(
        rf"run directory: {out / OLD}, .* global_step4", describe_run_directory(config(out, "latest"), 1)
    )
    elsewhere = describe_run_directory(config(tmp_path / "b", str(out / OLD)), 1)
    assert re.fullmatch(rf"run directory: a new .* {tmp_path / 'b'}, .* {out / OLD / 'global_step4'}", elsewhere)
    with pytest.raises(ConfigFault, match=rf"{out} .* step 5\b"):
        describe_run_directory(config(out, "5"), 1)


def test_commands_name_the_runs_in_a_folder_of_them(tmp_path: Path) -> None:
    from difftrain.cli.words import run_folder

    run = run_of(tmp_path, OLD)
    assert run_folder(run, "report.json") == run and run_folder(tmp_path, "report.json") == tmp_path
    (run / "report.json").touch()
    assert run_folder(run, "report.json") == run
    with pytest.raises(ConfigFault, match=rf"give .*\b{OLD} is "):
        run_folder(tmp_path, "report.json")
