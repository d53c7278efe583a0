"""The demo's plan and its folder: what is chosen for a device, and that preparing is whole, once, and shared."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from refusals import names

from difftrain.config.spellings.flags import FLAGS
from difftrain.contracts import DataFault
from difftrain.demo import prepare, recipe
from difftrain.demo.score import TARGETS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_every_flag_is_an_ordinary_one() -> None:
    for dataset in recipe.SIZES:
        for kind in ("cpu", "npu", "cuda"):
            assert recipe.plan(dataset, kind, 1).flags.keys() <= FLAGS.keys()


def test_what_the_demo_is_tuned_for() -> None:
    flags = recipe.plan("shapes", "cpu", 1).flags
    assert (flags["train_batch_size"], flags["learning_rate"], flags["ema_decay"]) == (32, "1e-3", 0.995)
    assert (flags["lr_warmup_steps"], flags["lr_decay_steps"], flags["caption_dropout_rate"]) == (100, "0.4", 0.1)


def test_precision_and_batch_follow_the_device() -> None:
    assert recipe.plan("shapes", "cpu", 1).flags["mixed_precision"] == "no"
    assert recipe.plan("shapes", "npu", 8).flags["mixed_precision"] == "fp16"
    assert recipe.plan("shapes", "npu", 8).flags["train_batch_size"] == 4
    assert recipe.plan("shapes", "cuda", 64).flags["train_batch_size"] == 1


def test_choices_are_printed() -> None:
    said = "\n".join(recipe.plan("emoji", "cpu", 8, 0.5).notes)
    assert names(said, "emoji", "0.5", "precision no", "batch 4 x 8 processes = 32", "cores")


def test_a_tiny_scale_still_makes_a_run() -> None:
    flags = recipe.plan("shapes", "cpu", 1, 0.001).flags
    assert flags["max_train_steps"] >= 2
    assert all(flags[name] >= 1 for name in ("sample_every_n_steps", "save_every_n_steps", "lr_warmup_steps"))


def test_folders_tell_versions_apart(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recipe.folder("shapes", 1)
    assert one.is_relative_to(cache) and one != recipe.folder("shapes", 0.5) != recipe.folder("emoji", 0.5)
    assert one.name in recipe.model_folder(one).name  # a run knows its weights by their folder's own name


def test_data_is_made_once() -> None:
    said: list[str] = []
    home = prepare.prepare("shapes", 0.01, data_only=True, log=said.append)
    stamp = (home / "data" / "00000.tar").stat().st_mtime_ns
    assert names(said[0], 256, home / "data")
    assert prepare.prepare("shapes", 0.01, data_only=True, log=said.append) == home
    assert len(said) == 1 and (home / "data" / "00000.tar").stat().st_mtime_ns == stamp
    assert sorted(path.name for path in home.iterdir()) == ["data", "prompts.txt"]


def test_two_at_once_leave_one_whole_folder() -> None:
    threads = [
        threading.Thread(
            target=prepare.prepare, args=("shapes", 0.01), kwargs={"data_only": True, "log": lambda _: None}
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    home = recipe.folder("shapes", 0.01)
    assert sorted(path.name for path in home.iterdir()) == ["data", "prompts.txt"]


def test_what_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(prepare.datasets, "write", full)
    with pytest.raises(DataFault, match=r"\bfull\b.*XDG_CACHE_HOME"):
        prepare.prepare("shapes", 0.01, data_only=True)
    assert not any(recipe.folder("shapes", 0.01).iterdir())


def test_targets_belong_to_known_data() -> None:
    assert TARGETS.keys() == recipe.SIZES.keys()
