"""Files and time that ask for a save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from difftrain.train.triggers import EXPORT, NOTHING, PERIODIC, QUIT, SAMPLE, ControlFiles


class Time:
    """A clock that stands until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_files_ask_once_and_are_removed(tmp_path: Path) -> None:
    clock = Time()
    watch = ControlFiles(tmp_path, None, clock)
    for name, wish in (("save", EXPORT), ("save_quit", QUIT)):
        clock.now += 1
        assert watch.requested() == NOTHING
        (tmp_path / name).touch()
        clock.now += 0.1
        assert watch.requested() == NOTHING, "the folder may be far away: not each step looks"
        clock.now += 1
        assert watch.requested() == wish and not any(tmp_path.iterdir())
        clock.now += 1
        assert watch.requested() == NOTHING


@pytest.mark.parametrize(("name", "wish"), [("save", EXPORT), ("save_quit", QUIT)])
def test_a_file_that_lies_there_before_the_run_goes_on_counts_once(tmp_path: Path, name: str, wish: int) -> None:
    (tmp_path / name).touch()
    clock = Time()
    watch = ControlFiles(tmp_path, None, clock)
    assert watch.requested() == wish
    clock.now += 1
    assert watch.requested() == NOTHING


def test_both_files_at_once_end_the_run(tmp_path: Path) -> None:
    for name in ("save", "save_quit"):
        (tmp_path / name).touch()
    assert ControlFiles(tmp_path, None).requested() == QUIT and not any(tmp_path.iterdir())


def test_a_folder_of_that_name_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    assert ControlFiles(tmp_path, None).requested() == NOTHING


def test_a_file_that_stays_is_heeded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    (tmp_path / "save").touch()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    watch = ControlFiles(tmp_path, None, clock)
    assert watch.requested() == EXPORT
    clock.now += 1
    assert watch.requested() == NOTHING


def test_minutes_count_from_the_last_checkpoint() -> None:
    clock = Time()
    watch = ControlFiles(None, 2.0, clock)
    clock.now += 119
    assert watch.requested() == NOTHING
    clock.now += 1
    assert watch.requested() == PERIODIC == watch.requested()  # until there is one
    watch.saved()
    assert watch.requested() == NOTHING
    clock.now += 120
    assert watch.requested() == PERIODIC


def test_samples_that_are_asked_for_wait_for_a_larger_request(tmp_path: Path) -> None:
    """Ranks agree on the largest of all requests, so the file's may not be the one that is heard."""
    clock = Time()
    for name in ("save", "sample"):
        (tmp_path / name).touch()
    watch = ControlFiles(tmp_path, None, clock)
    assert watch.requested() == EXPORT and not any(tmp_path.iterdir())
    assert watch.requested() == SAMPLE == watch.requested()
    watch.sampled()
    clock.now += 1
    assert watch.requested() == NOTHING


def test_touching_the_folder_of_samples_asks_for_more(tmp_path: Path) -> None:
    clock = Time()
    folder = tmp_path / "sample"
    watch = ControlFiles(tmp_path, None, clock)

    def asked() -> int:
        clock.now += 1
        return watch.requested()

    assert asked() == NOTHING
    folder.mkdir()
    assert asked() == NOTHING
    os.utime(folder, ns=(10**18, 10**18 + 5))  # as a new picture leaves it
    assert asked() == NOTHING
    folder.touch()
    assert asked() == SAMPLE == asked() and folder.is_dir()
    watch.sampled()
    assert asked() == NOTHING
