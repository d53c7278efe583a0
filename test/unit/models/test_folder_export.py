"""A folder's files put beside others: what says that all is there comes last, and goes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.models.weights.folder_export import inside

INDEX = "model_index.json"


def put(folder: Path, text: str) -> None:
    with inside(folder, last=INDEX) as parts:
        (parts / "unet").mkdir(parents=True)
        (parts / "unet" / "weights").write_text(text)
        (parts / INDEX).write_text(text)


def test_parts_lie_beside_what_else_is_there_and_replace_older_ones(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    put(tmp_path, "one")
    (tmp_path / "unet" / "stale").touch()
    put(tmp_path, "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", INDEX, "unet"]
    assert [path.name for path in (tmp_path / "unet").iterdir()] == ["weights"]
    assert {(tmp_path / name).read_text() for name in (INDEX, "unet/weights")} == {"two"}


def test_what_is_not_finished_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path, "one")
    with pytest.raises(RuntimeError), inside(tmp_path, last=INDEX) as parts:
        parts.mkdir()
        (parts / INDEX).write_text("two")
        raise RuntimeError
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == [INDEX, "unet"] and (tmp_path / INDEX).read_text() == "one"
    )


def test_a_move_that_breaks_off_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "one")

    def broken(*_: object) -> None:
        raise OSError

    monkeypatch.setattr("difftrain.models.weights.folder_export._swap_in", broken)
    with pytest.raises(OSError):
        put(tmp_path, "two")
    assert not (tmp_path / INDEX).exists()
