"""Which checkpoint a run continues from, and what a dead run left."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import pytest

from difftrain.checkpoint import Manifest, clean, commit, newest, open_given
from difftrain.checkpoint.record import now
from difftrain.contracts import ConfigFault
from difftrain.distributed.ranks import Ranks
from difftrain.io.files import FileEntry, aside_of
from difftrain.models.weights.folder_export import _swap_in


def write(work: Path) -> list[Path]:
    (work / "weights").write_bytes(b"1234")
    return [work / "weights"]


def save(parent: Path, name: str, step: int) -> Path:
    return commit(parent, name, write, Ranks(), {"step": step})


def test_the_order_is_that_of_steps_whatever_the_names(tmp_path):
    save(tmp_path, "N-step00000004-state", 4)
    save(tmp_path, "N-000001-state", 6)
    assert newest(tmp_path, "N").name == "N-000001-state"
    save(tmp_path, "N-step00000008-state", 8)
    save(tmp_path, "N-state", 10)
    assert newest(tmp_path, "N").name == "N-state"
    save(tmp_path, "N-step123456789-state", 123456789)
    assert newest(tmp_path, "N").name == "N-step123456789-state"


def test_other_names_are_other_runs(tmp_path):
    save(tmp_path, "N-step4-state", 10)
    time.sleep(0.002)  # of one step, what was saved last counts
    save(tmp_path, "N2-state", 10)
    assert newest(tmp_path, "N") is None
    assert newest(tmp_path).name == "N2-state"
    assert newest(tmp_path / "missing", "N") is None


def test_a_session_that_begins_right_after_a_save_is_dated_after_it(tmp_path):
    """A resume tells by these dates which saves are of the branch that it left."""
    saved = save(tmp_path, "global_step10", 10)
    time.sleep(0.002)
    assert now() > Manifest.read(saved).created


def test_what_a_dead_run_left_is_put_away_by_name(tmp_path):
    whole = save(tmp_path, "N-step00000004-state", 4)
    unnamed = save(tmp_path, "N-step00000008-state", 8).rename(tmp_path / ("tmp-" + "a" * 32))
    torn = save(tmp_path, "N-step00000012-state", 12).rename(tmp_path / ("tmp-" + "b" * 32))
    (torn / "manifest.json").unlink()
    trash = save(tmp_path, "N-step00000002-state", 2).rename(tmp_path / ("trash-" + "c" * 32))
    theirs = tmp_path / "tmp-of-mine"
    theirs.mkdir()
    said: list[str] = []
    clean(tmp_path, said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        whole.name,
        "N-step00000008-state",
        "tmp-of-mine",
    ]
    assert len(said) == 3 and not unnamed.exists() and not torn.exists() and not trash.exists()
    assert newest(tmp_path, "N").name == "N-step00000008-state"


def killed_at_rename(monkeypatch: pytest.MonkeyPatch, number: int, aside: Path, path: Path) -> None:
    """Swap an export in, and die just before the n-th rename."""
    calls, rename = [], Path.rename

    def dying(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == number:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", dying)
        _swap_in(aside, path)


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "model_index.json").write_text(content)
    return path


def test_what_a_killed_export_left_is_removed_and_what_it_pushed_aside_is_put_back(tmp_path, monkeypatch):
    aside_of(tmp_path / "N-v1.0.safetensors").write_bytes(b"half of the weights")
    folder(aside_of(tmp_path / "N-000001"), "half")
    path = folder(tmp_path / "N-v1.0", "older")
    killed_at_rename(monkeypatch, 2, folder(aside_of(path), "newer"), path)
    assert not path.exists()
    theirs = tmp_path / ".notes.tmp"
    theirs.write_text("mine")
    said: list[str] = []
    clean(tmp_path, said.append)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".notes.tmp", "N-v1.0"]
    assert (path / "model_index.json").read_text() == "older"
    assert len(said) == 4 and sum(each.endswith(" removed") for each in said) == 3
    assert sum(each.startswith("export N-v1.0, ") for each in said) == 1


def test_what_a_finished_export_pushed_aside_is_removed(tmp_path, monkeypatch):
    path = folder(tmp_path / "N", "older")
    monkeypatch.setattr("shutil.rmtree", lambda *args, **rest: None)  # the process ends before it is deleted
    _swap_in(folder(aside_of(path), "newer"), path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    clean(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["N"]
    assert (path / "model_index.json").read_text() == "newer"


def test_a_swap_that_fails_leaves_the_older_export(tmp_path):
    path = folder(tmp_path / "N", "older")
    with pytest.raises(FileNotFoundError):
        _swap_in(aside_of(path), path)
    assert [each.name for each in tmp_path.iterdir()] == ["N"]


def test_of_a_name_and_what_it_pushed_aside_the_newer_stays(tmp_path):
    token = "d" * 32
    save(tmp_path, "N-state", 4).rename(tmp_path / f"tmp-{token}-old")
    save(tmp_path, "N-state", 8).rename(tmp_path / f"tmp-{token}")
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["N-state"]
    from difftrain.checkpoint import load_meta

    assert load_meta(tmp_path / "N-state") == {"step": 8}


def test_a_named_folder_is_checked_and_the_error_helps(tmp_path):
    good = save(tmp_path, "N-step00000004-state", 4)
    torn = save(tmp_path, "N-step00000008-state", 8)
    (torn / "weights").write_bytes(b"12")
    assert open_given(good) == good
    with pytest.raises(ConfigFault, match=str(tmp_path / "missing")):
        open_given(tmp_path / "missing")
    with pytest.raises(ConfigFault, match=r"no manifest.json \(the .*one in it is N-step00000008-state\)"):
        open_given(tmp_path)
    with pytest.raises(ConfigFault, match=r"weights has 2 bytes, not 4 \(.*: N-step00000004-state\)"):
        open_given(torn)


def forged(parent: Path, **changes: object) -> Path:
    """A folder as a dead run leaves one aside, with a manifest whose checksum is right and whose facts are not."""
    folder = parent / "N-step00000004-state"
    if not folder.exists():
        folder = save(parent, folder.name, 4)
    aside = folder.with_name(f"tmp-{'0' * 32}")
    folder.rename(aside)
    content = json.loads((aside / "manifest.json").read_text()) | changes
    del content["digest"]
    plain = {**content, "files": {name: asdict(FileEntry(**entry)) for name, entry in content["files"].items()}}
    digest = sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (aside / "manifest.json").write_text(json.dumps({**content, "digest": digest}))
    return aside


@pytest.mark.parametrize(
    "name", ["{}/elsewhere", "../elsewhere", "a/../../elsewhere", "..", ".", "", "a/b", "a\0b", 5, None]
)
def test_no_manifest_moves_a_folder_elsewhere(tmp_path, name):
    parent = tmp_path / "run"
    parent.mkdir()
    aside = forged(parent, name=name.format(tmp_path) if isinstance(name, str) else name)
    clean(parent)
    assert not aside.exists() and list(tmp_path.iterdir()) == [parent] and not list(parent.iterdir())


@pytest.mark.parametrize("file", ["{}/stranger", "../stranger", "a/../../stranger"])
def test_no_manifest_lists_files_elsewhere(tmp_path, file):
    (tmp_path / "stranger").write_bytes(b"1234")
    parent = tmp_path / "run"
    parent.mkdir()
    entry = asdict(FileEntry.of(tmp_path / "stranger"))
    forged(parent, files={file.format(tmp_path): entry}).rename(parent / "N-state")
    assert newest(parent, "N") is None


@pytest.mark.parametrize(
    "changes", [{"meta": {}}, {"meta": []}, {"meta": {"step": "x"}}, {"created": 5}, {"format": "1"}]
)
def test_a_manifest_of_other_types_is_passed_over(tmp_path, changes):
    forged(tmp_path, **changes).rename(tmp_path / "N-state")
    assert newest(tmp_path, "N") is None


def test_what_lies_aside_may_have_any_name(tmp_path):
    for name in ("...0123abcd.old", "....0123abcd.tmp"):
        (tmp_path / name).mkdir()
    clean(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "an export has a name"


def test_a_manifest_that_is_a_pipe_or_deep(tmp_path):
    for number, make in enumerate((os.mkfifo, lambda path: path.write_text("[" * 100_000))):
        folder = save(tmp_path, f"N-step0000000{number}-state", number)
        (folder / "manifest.json").unlink()
        make(folder / "manifest.json")
    assert newest(tmp_path, "N") is None
