"""Resumes in run directories, in this process: what is begun anew, gone back to, refused; disks that fill; one look."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import losses, metrics, write_pictures
from run_dirs import only, runs, tensors

from difftrain import checkpoint
from difftrain.config import toml
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault, TrainingFault
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.train.run import run

Start = Callable[..., int]
STEPS = 10  # two epochs
STILL = 1e-30  # a rate at which no weight moves: a loss then says which batch it is of, and which noise it met


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), 10)


@pytest.fixture
def start(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Run the tiny SDXL with a checkpoint at every step; keywords are "section_field"s that differ."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(pictures.parent / "cache"))

    def begun(resume: str | None = None, **changes: Any) -> int:
        tables: dict[str, Any] = {
            "model": {"init_from_config": "tiny"},
            "data": {"dirs": [str(pictures)], "resolution": [64, 64], "workers": 0},
            "training": {"batch_size": 2, "max_steps": STEPS, "seed": 1, "threads": 1},
            "optimizer": {"learning_rate": STILL},
            "save": {"output_dir": str(tmp_path / "out"), "run_dirs": True, "naming": "steps", "resume": resume},
        }
        tables["save"] |= {"checkpoint_every_n_minutes": 1e-6}
        for name, value in changes.items():
            section, _, field = name.partition("_")
            tables.setdefault(section, {})[field] = value
        return run(TrainConfig.model_validate(tables), ["train.py"])

    return begun


def home(tmp_path: Path) -> Path:
    return only(tmp_path / "out")


def test_an_epoch_that_begins_anew_has_its_batches_again(start: Start, tmp_path: Path) -> None:
    start(save_every_n_epochs=1)
    straight = losses(home(tmp_path))
    assert len(set(straight)) == STEPS
    start("3", save_reset_dataloader=True, training_max_steps=6)
    assert losses(home(tmp_path)) == straight[:3] + straight[:3]
    start("latest", training_max_steps=13, save_every_n_epochs=1)  # without the option: from where that was
    again = metrics(home(tmp_path))
    assert [line["step_loss"] for line in again] == straight[:3] + straight
    assert [line["epoch"] for line in again] == [1] * 8 + [2] * 5
    assert [line["step"] for line in again] == list(range(1, 14))
    assert (home(tmp_path) / "epoch2").is_dir() and json.loads((home(tmp_path) / "report.json").read_text())


def test_epochs_of_every_image_go_on_though_the_key_is_gone_and_begin_anew_as_whole_ones(
    start: Start, tmp_path: Path
) -> None:
    start(data_epoch_batches="every", training_batch_size=3, training_max_steps=6)
    straight = losses(home(tmp_path))
    seen = [line["samples_seen"] for line in metrics(home(tmp_path))]
    assert seen[3] == 10 and [line["epoch"] for line in metrics(home(tmp_path))] == [1] * 4 + [2] * 2
    start("3", training_batch_size=3, training_max_steps=6)
    assert losses(home(tmp_path)) == straight
    # a micro batch of another size makes other steps, unless the epoch begins anew
    with pytest.raises(ConfigFault) as caught:
        start("latest", training_batch_size=1, training_accumulation=3, training_max_steps=8)
    assert "micro batch: 3 there, 1 here" in str(caught.value)
    start("3", training_batch_size=1, training_accumulation=3, training_max_steps=8, save_reset_dataloader=True)
    assert [line["samples_seen"] for line in metrics(home(tmp_path))][3:7] == [seen[2] + n for n in (3, 6, 9, 10)]


def test_other_data_or_another_batch_need_the_epoch_to_begin_anew(start: Start, pictures: Path, tmp_path: Path) -> None:
    start(training_max_steps=3)
    more = write_pictures(tmp_path / "pictures", 12)
    for change in ({"data_dirs": [str(more)]}, {"training_batch_size": 4}):
        with pytest.raises(ConfigFault) as caught:
            start("latest", training_max_steps=6, **change)
        said = str(caught.value)
        wanted = (
            ("global batch: 2 there, 4 here",)
            if "training_batch_size" in change
            else ("10 -> 12", "--reset_dataloader")
        )
        assert all(each in said for each in wanted)
    start("latest", data_dirs=[str(more)], training_only_warn=True, training_max_steps=4)
    start("latest", data_dirs=[str(more)], training_batch_size=4, training_max_steps=6, save_reset_dataloader=True)
    assert [line["samples_seen"] for line in metrics(home(tmp_path))] == [2, 4, 6, 8, 12, 16]


def test_a_first_epoch_that_begins_anew_where_nothing_is_left(start: Start, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("soft colours --w 64 --h 64 --s 1\n")
    start(training_max_steps=2)
    look = {"sample_test_only": True, "sample_prompts": str(tmp_path / "prompts.txt")}
    assert start("2", save_reset_dataloader=True, training_max_steps=3, **look) == 0
    out = tmp_path / "elsewhere"
    assert (
        start(
            str(runs(tmp_path / "out")[0]), save_reset_dataloader=True, training_max_steps=2, save_output_dir=str(out)
        )
        == 0
    )
    assert {"step2", "global_step2", "report.json"} <= {path.name for path in only(out).iterdir()}
    with pytest.raises(ConfigFault, match=r"step 2, .* 1 step\b"):
        start("2", training_max_steps=1)


def test_an_optimizer_that_begins_anew_warms_up_again(start: Start, tmp_path: Path) -> None:
    warm = {"optimizer_learning_rate": 1e-3, "optimizer_scheduler": "constant_with_warmup", "optimizer_warmup_steps": 4}
    start(**warm, training_max_steps=6)
    before = tensors(home(tmp_path) / "global_step6")
    start("latest", **warm, save_reset_optimizer=True, training_max_steps=8)
    start("latest", **warm)
    rates = [line["lr"] for line in metrics(home(tmp_path))]
    assert rates[6:] == rates[:4] and rates[5] == 1e-3 > rates[6]
    counts = [t for name, t in tensors(home(tmp_path) / "global_step10").items() if name.endswith("/step")]
    assert counts and {int(count) for count in counts} == {4}
    assert any(name.endswith("/step") and int(t) == 6 for name, t in before.items())


def test_a_finished_run_has_nothing_left_and_a_longer_one_goes_on(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(training_max_steps=3)
    told = (home(tmp_path) / "run.json").read_text()
    assert start("latest", training_max_steps=3) == 0
    assert re.search(r"finished .* step 3; nothing ", capsys.readouterr().out)
    assert (home(tmp_path) / "run.json").read_text() == told
    start("latest", training_max_steps=4)
    assert "training.max_steps: 3 there, 4 here" in capsys.readouterr().out
    assert (
        len(losses(home(tmp_path))) == 4 and json.loads((home(tmp_path) / "run.json").read_text())["finished_step"] == 4
    )
    start(training_max_steps=3)
    assert len(runs(tmp_path / "out")) == 2, "without the option the same command is a new run"


def test_going_back_leaves_what_came_after(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(training_max_steps=6)
    straight = losses(home(tmp_path))
    full: Any = checkpoint.commit

    def torn(parent: Path, name: str, *rest: Any) -> Path:
        if name == "global_step5":
            raise KeyboardInterrupt  # as if killed: of this branch there is step 4 alone
        return full(parent, name, *rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "commit", torn)
        start("3", training_max_steps=6)
    capsys.readouterr()
    start("latest", training_max_steps=6)
    assert "global_step4 at step 4" in capsys.readouterr().out, "not step 6, which is of the branch that was left"
    assert losses(home(tmp_path)) == straight


def test_a_full_disk_fails_an_export_and_not_the_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = SDXLFamily.export

    def full(self: SDXLFamily, weights: Any, parts: Any, layout: str, path: Path, **more: Any) -> Path:
        if path.parent.name in ("step2", "step3"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return export(self, weights, parts, layout, path, **more)

    monkeypatch.setattr(SDXLFamily, "export", full)
    start(training_max_steps=4, save_every_n_steps=1)
    names = {path.name for path in home(tmp_path).iterdir()}
    assert {"step1", "step4", "global_step4"} <= names and not {"step2", "step3"} & names
    assert json.loads((home(tmp_path) / "report.json").read_text())["notes"]["failed_saves"] == 2
    with pytest.raises(TrainingFault, match=r"--resume_from_checkpoint .*newest"):
        start(training_max_steps=3)


def test_an_average_every_few_steps_keeps_its_rhythm_over_resumes(start: Start, tmp_path: Path) -> None:
    ema = {"ema_enable": True, "ema_decay": 0.5, "ema_update_every": 3, "optimizer_learning_rate": 1e-3}
    start(**ema, training_max_steps=4)
    start("2", **ema, training_max_steps=7)
    weights, averages = ({}, {})
    for step in range(1, 8):
        kept = tensors(home(tmp_path) / f"global_step{step}")
        weights[step] = {n.partition(":")[2]: t for n, t in kept.items() if n.startswith("weights")}
        averages[step] = {n.partition(":")[2]: t for n, t in kept.items() if n.startswith("ema")}
    for step in range(2, 8):
        for name, average in averages[step].items():
            before = averages[step - 1][name]
            after = before if step % 3 else torch.lerp(before, weights[step][name], 0.5)
            assert torch.equal(average, after), (step, name)


def test_one_look_draws_once_and_trains_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("soft colours --w 64 --h 64 --s 2 --d 3\n")
    start(training_max_steps=2)
    trained = home(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    look = {"sample_prompts": str(tmp_path / "prompts.txt"), "sample_test_only": True}
    assert start("latest", **look) == 0 and start(**look) == 0
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    resumed, fresh = (sorted((folder / "sample").glob("*grid.png")) for folder in runs(tmp_path / "out")[1:])
    assert [path.name for path in (*resumed, *fresh)] == ["last_000002_grid.png", "last_000000_grid.png"]


def test_the_configuration_of_a_run_begins_another_one(start: Start, tmp_path: Path) -> None:
    start(training_max_steps=1)
    values, faults = toml.read(home(tmp_path) / "config.toml")
    assert not faults and values["save"]["output_dir"] == str(tmp_path / "out") and values["save"].get("resume") is None
    run(TrainConfig.model_validate(values), ["train.py"])
    first, second = runs(tmp_path / "out")
    assert losses(first) == losses(second)
