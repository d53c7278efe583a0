"""Run directories of train.py in processes of their own: killed at random, resumed on as many ranks and on others."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from doors import losses, metrics, wait_for
from run_dirs import EPOCH, Trainer, family_of, only, runs, same_end, steps_done

from difftrain.checkpoint import load_meta

WAYS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def straight(trainer: Trainer) -> dict[int, Path]:
    """Run unbroken epochs, on one rank (which builds the cache) and on three."""
    found = {}
    for ranks in (1, 3):
        out = trainer.root / f"straight{ranks}"
        trainer.train(out, ranks=ranks)
        found[ranks] = only(out)
    return found


def test_a_run_leaves_its_directory(straight: dict[int, Path]) -> None:
    names = {path.name for path in straight[1].iterdir()}
    told = {
        "config.toml",
        "metrics.jsonl",
        "report.json",
        "report.html",
        "tensorboard_logs",
        "run.json",
        "sessions.json",
    }
    assert told <= names and {"epoch1", "epoch1-ema"} <= names
    assert {f"global_step{step}" for step in range(1, EPOCH + 1)} <= names
    assert any((straight[1] / "tensorboard_logs").iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 3])
def test_three_ends_at_random_in_one_epoch_change_no_bit(
    trainer: Trainer, straight: dict[int, Path], ranks: int
) -> None:
    out, chance = trainer.root / f"broken{ranks}", random.Random(ranks)
    goes_on: tuple[str, ...] = ()
    for turn, way in enumerate(WAYS):
        at = 6 * turn + chance.randrange(1, 6)
        trainer.broken_off(out, *goes_on, ranks=ranks, step=at, way=way)
        assert at <= max(steps_done(out)) < EPOCH, "it was to be ended in mid-epoch"
        goes_on = ("--resume_from_checkpoint",)
    printed = trainer.train(out, *goes_on, ranks=ranks)
    assert re.search(r"resumed run", printed)
    same_end(only(out), straight[ranks])
    assert [line["step"] for line in metrics(only(out))] == list(range(1, EPOCH + 1))


def test_on_other_ranks_the_same_samples_and_losses(trainer: Trainer, straight: dict[int, Path]) -> None:
    one, three = losses(straight[1]), losses(straight[3])
    assert three == pytest.approx(one, rel=1e-6)
    trainer.train(straight[3].parent, "--resume_from_checkpoint=12", ranks=1)
    again = losses(straight[3])
    assert again[:12] == three[:12] and len(again) == EPOCH
    assert again[12:] == pytest.approx(three[12:], rel=1e-6)


def test_files_that_ask_save_on_all_ranks_and_end_the_run_in_good_order(trainer: Trainer) -> None:
    out = trainer.root / "asked"
    rarely = (
        "--save.checkpoint_every_n_minutes=999",
        "--training.max_steps=100000",
        "--save.save_every_n_epochs=99999",
    )
    process = trainer.begin(out, *rarely, ranks=3)
    run = wait_for(lambda: next(iter(runs(out)), None))
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > 2)
    for name in ("save", "save_quit"):
        before = steps_done(out)
        (run / name).touch()
        (step,) = wait_for(lambda known=before: steps_done(out) - known)
        wait_for((run / f"step{step}" / "model_index.json").exists)
        assert not (run / name).exists()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert f"stopped by save_quit at step {max(steps_done(out))}" in printed and "--resume_from_checkpoint" in printed
    assert f"global_step{max(steps_done(out))}" in {path.name for path in run.iterdir()}


def test_two_runs_at_once_in_one_output_folder_get_two(trainer: Trainer) -> None:
    out = trainer.root / "both"
    processes = [trainer.begin(out, "--training.max_steps=1") for _ in range(2)]
    for process in processes:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
    assert len(runs(out)) == 2 and all((run / "global_step1").is_dir() for run in runs(out))


def test_another_depth_is_refused_with_the_difference_named(trainer: Trainer, straight: dict[int, Path]) -> None:
    other = trainer.root / "deeper.json"
    printed = trainer.train(
        straight[1].parent, "--resume_from_checkpoint", f"--model.init_from_config={deeper(other)}", expect=2
    )
    assert "--resume_from_checkpoint" in printed and "num_layers" in printed


def test_an_epoch_begins_anew_on_three_ranks(trainer: Trainer, straight: dict[int, Path]) -> None:
    before = losses(straight[3])[:2]
    anew = ("--resume_from_checkpoint=2", "--reset_dataloader", "--training.max_steps=3")
    trainer.train(straight[3].parent, *anew, ranks=3)
    assert losses(straight[3])[:2] == before and len(losses(straight[3])) == 3


def test_torchrun_starts_a_killed_rank_anew_and_a_reset_acts_once(trainer: Trainer, straight: dict[int, Path]) -> None:
    out = trainer.root / "elastic"
    for path in (straight[1], *(straight[1] / f"global_step{step}" for step in (11, 12))):
        shutil.copytree(path, out / path.relative_to(straight[1].parent), ignore=shutil.ignore_patterns("*_step*"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--max-restarts=1"]
    there = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    resets = ("--reset_optimizer", "--reset_dataloader")
    typed = trainer.words(out, "--resume_from_checkpoint=12", *resets, "--training.max_steps=17")[1:]
    process = trainer._start([*torchrun, *there, *typed])
    wait_for(lambda: process.poll() is not None or 15 in steps_done(out), message="no step 15")
    os.kill(family_of(process.pid)[1], signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    both = [len(re.findall(rf"{flag}: .*step 13\b", printed)) for flag in ("--reset_optimizer", "--reset_dataloader")]
    assert both == [1, 1]
    assert printed.count("--reset_dataloader, --reset_optimizer: ") == 1
    assert [line["step"] for line in metrics(only(out))] == list(range(1, 18))
    meta = load_meta(only(out) / "global_step17")
    assert (meta["schedule_from"], meta["epoch"], meta["data_offset"]) == (12, 0, -12)


def deeper(path: Path) -> Path:
    """Write the tiny architecture with one block more."""
    content = json.loads(files("difftrain.models").joinpath("sizes_shipped", "sd3.tiny.json").read_text())
    content["transformer"]["num_layers"] += 1
    path.write_text(json.dumps(content))
    return path
