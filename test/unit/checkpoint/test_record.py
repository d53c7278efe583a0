"""What a folder holds, and what may be done with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.checkpoint import (
    Empty,
    Finished,
    Foreign,
    RunRecord,
    Unfinished,
    choose_start,
    commit,
    inspect,
)
from difftrain.contracts import ConfigFault
from difftrain.distributed.ranks import Ranks


def write(work: Path) -> list[Path]:
    (work / "weights").write_bytes(b"1234")
    return [work / "weights"]


def save(parent: Path, step: int = 4) -> Path:
    return commit(parent, f"N-step{step:08d}-state", write, Ranks(), {"step": step})


def record(out: Path, finished: bool = False) -> RunRecord:
    mine = RunRecord(config_digest="abc", seed=1, output_name="N", total_steps=12).begun(0, 2)
    if finished:
        mine = mine.ended(12)
    mine.write(out)
    return mine


def start(out: Path, resume: str | None = None, digest: str = "abc") -> Path | None:
    return choose_start(inspect(out, "N"), resume, digest, out)


def test_a_record_reads_back_and_grows(tmp_path):
    mine = record(tmp_path)
    assert RunRecord.read(tmp_path) == mine
    again = mine.begun(4, 1)
    assert [each["from_step"] for each in again.sessions] == [0, 4] and again.started == mine.started
    assert again.ended(12).finished_step == 12 and again.ended(12).begun(12, 1).finished_step is None
    assert RunRecord.read(tmp_path / "missing") is None
    (tmp_path / "run.json").write_text('{"seed": 1')
    with pytest.raises(ConfigFault, match=r"run\.json"):
        inspect(tmp_path, "N")


@pytest.mark.parametrize("resume", [None, "auto"])
def test_an_empty_folder_starts_afresh(tmp_path, resume):
    assert inspect(tmp_path / "missing", "N") == Empty()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "M.safetensors").write_text("another name")
    (tmp_path / ".claim").mkdir()
    assert inspect(tmp_path, "N") == Empty()
    assert start(tmp_path, resume) is None


def test_an_unfinished_run_goes_on_with_auto_only(tmp_path):
    record(tmp_path)
    path = save(tmp_path)
    assert inspect(tmp_path, "N") == Unfinished(RunRecord.read(tmp_path), path)
    assert start(tmp_path, "auto") == path
    assert start(tmp_path, "auto", digest="changed") == path  # what must not change, the checkpoint itself says
    with pytest.raises(ConfigFault, match=r"another run \(.*N-step00000004-state\) \(--resume=auto"):
        start(tmp_path)


def test_an_unfinished_run_without_a_checkpoint(tmp_path):
    record(tmp_path)
    assert start(tmp_path, "auto") is None
    assert start(tmp_path, "auto", digest="changed") is None  # nothing is there to lose
    (tmp_path / "N-step00000004.safetensors").write_text("an export")
    assert start(tmp_path, "auto") is None
    with pytest.raises(ConfigFault, match=r"another configuration .* no checkpoint"):
        start(tmp_path, "auto", digest="changed")


def test_a_finished_run_is_refused_or_extended(tmp_path):
    record(tmp_path, finished=True)
    path = save(tmp_path, 12)
    assert isinstance(inspect(tmp_path, "N"), Finished)
    with pytest.raises(ConfigFault, match=r"finished .* step 12"):
        start(tmp_path)
    assert start(tmp_path, "auto") == path


def test_files_without_a_record_are_not_overwritten(tmp_path):
    (tmp_path / "N.safetensors").write_text("weights")
    assert inspect(tmp_path, "N") == Foreign(("N.safetensors",))
    for resume in (None, "auto"):
        with pytest.raises(ConfigFault, match=r"would overwrite: N\.safetensors"):
            start(tmp_path, resume)
    path = save(tmp_path)
    assert start(tmp_path, "auto") == path


def test_a_named_checkpoint(tmp_path):
    here, other = tmp_path / "here", tmp_path / "other"
    other.mkdir()
    record(other)
    older, newer = save(other, 4), save(other, 8)
    assert start(here, str(older)) == older
    assert start(other, str(older)) == older and start(other, "auto") == newer
    here.mkdir()
    record(here)
    with pytest.raises(ConfigFault, match=rf"{here} .*another run"):
        start(here, str(older))


@pytest.mark.parametrize(
    "name",
    ["v1.0.safetensors", "v1.0.ckpt", "v1.0", "v1.0-ema.safetensors", "v1.0-step00000004", "v1.0-000001-ema", "v1.0-000001.ckpt"],
)  # fmt: skip
@pytest.mark.parametrize("output_name", ["v1.0", "sdxl-v1.0"])
def test_a_dot_in_the_name_is_no_suffix(tmp_path, name, output_name):
    path = tmp_path / name.replace("v1.0", output_name)
    path.write_text("weights") if path.suffix in (".safetensors", ".ckpt") else path.mkdir()
    assert inspect(tmp_path, output_name) == Foreign((path.name,))
    assert inspect(tmp_path, output_name.removesuffix(".0")) == Empty()


@pytest.mark.parametrize(
    ("digest", "ended", "continues"), [("abc", False, True), ("other", False, False), ("abc", True, False)]
)
def test_what_is_offered_is_not_refused_in_its_turn(tmp_path: Path, digest: str, ended: bool, continues: bool) -> None:
    """--resume=auto, which a run of another configuration or a finished one would refuse, or its checkpoint by name."""
    newest, known = save(tmp_path, 12), record(tmp_path)
    if ended:
        known.ended(12).write(tmp_path)
    with pytest.raises(ConfigFault) as caught:
        start(tmp_path, None, digest)
    assert ("=auto" in str(caught.value)) == continues and (str(newest) in str(caught.value)) != continues
