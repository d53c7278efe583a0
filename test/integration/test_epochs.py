"""Epochs of every image through the door: the same steps on 1, 2 and 4 ranks, exact resumes, and no run of nothing."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from doors import Door, losses, metrics, write_pictures
from safetensors.torch import load_file

BATCH, UNIT, EPOCHS = 2, 4, 3


def line(door: Door, out: Path, *more: str, accumulation: int = UNIT, epochs: int = EPOCHS) -> list[str]:
    """Return the contract line for so many epochs, or for the steps that `more` gives."""
    flags = door.flags(
        out, "--max_data_loader_n_workers=0", f"--gradient_accumulation_steps={accumulation}", batch=BATCH
    )
    own = ("--max_train_steps", "--save_every_n_steps")
    length = () if any(flag.startswith(own[0]) for flag in more) else (f"--max_train_epochs={epochs}",)
    return [*(flag for flag in flags if not flag.startswith(own)), *length, *more]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    """Eleven pictures: nine of one bucket, two of another."""
    return Door(write_pictures(tmp_path_factory.mktemp("eleven"), 11), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def alone(door: Door, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One rank, without interruption."""
    out = tmp_path_factory.mktemp("epochs") / "out"
    return out, door.run(line(door, out, "--save_every_n_epochs=1"))


def buckets_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"bucket \d+x\d+: (\d+)", text)]


def test_every_image_once_an_epoch_in_kohyas_number_of_updates(alone: tuple[Path, str]) -> None:
    out, text = alone
    counts = buckets_of(text)
    assert sum(counts) == 11 and any(count % BATCH for count in counts)
    updates = math.ceil(sum(math.ceil(count / BATCH) for count in counts) / UNIT)
    assert sum(math.ceil(count / BATCH) for count in counts) % UNIT, "no rank is ever idle"
    lines = metrics(out)
    assert [each["epoch"] for each in lines] == [e + 1 for e in range(EPOCHS) for _ in range(updates)]
    assert [each["samples_seen"] for each in lines][updates - 1 :: updates] == [11, 22, 33]
    report = json.loads((out / "report.json").read_text())
    assert (report["steps"], report["samples_seen"]) == (EPOCHS * updates, 33)
    # what is saved after epochs lies where they end
    assert {path.name for path in out.glob("*.safetensors")} >= {"NAME-000001.safetensors", "NAME-000002.safetensors"}
    assert 'epoch_batches = "every"' in (out / "config.toml").read_text()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_losses_are_those_of_any_number_of_ranks(
    door: Door, alone: tuple[Path, str], tmp_path: Path, ranks: int
) -> None:
    door.run(line(door, tmp_path / "out", accumulation=UNIT // ranks), ranks=ranks)
    assert losses(tmp_path / "out") == pytest.approx(losses(alone[0]), rel=1e-6)
    seen, wanted = ([each["samples_seen"] for each in metrics(out)] for out in (tmp_path / "out", alone[0]))
    assert seen == wanted
    mine, theirs = (load_file(out / "NAME.safetensors") for out in (tmp_path / "out", alone[0]))
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_in_mid_epoch_is_bit_equal(door: Door, tmp_path: Path, ranks: int) -> None:
    more, accumulation = "--save_every_n_steps=2", 2 // ranks  # several steps an epoch
    straight, broken, rest = (tmp_path / name for name in ("straight", "broken", "rest"))
    door.run(line(door, straight, more, accumulation=accumulation), ranks=ranks)
    door.run(line(door, broken, more, "--max_train_steps=2", accumulation=accumulation), ranks=ranks)
    state = broken / "NAME-step00000002-state"
    door.run(line(door, rest, more, f"--resume={state}", accumulation=accumulation), ranks=ranks)
    assert metrics(straight)[1]["epoch"] == metrics(straight)[2]["epoch"], "it ended an epoch"
    assert losses(broken) + losses(rest) == losses(straight)
    mine, theirs = (load_file(out / "NAME.safetensors") for out in (rest, straight))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_run_of_no_step_is_an_error_with_its_arithmetic(door: Door, tmp_path: Path) -> None:
    flags = line(door, tmp_path / "out", "--epoch_batches=whole", accumulation=8, epochs=1)
    for dry in ([], ["--dry_run"]):
        text = door.run([*flags, *dry], expect=2)
        assert "--max_train_epochs=1" in text and "--epoch_batches=every" in text and "16" in text
    assert not list(tmp_path.glob("out/*.safetensors"))


@pytest.mark.flags("epoch_batches")
def test_a_run_goes_on_with_the_epochs_that_it_was_written_with(door: Door, tmp_path: Path) -> None:
    def steps(name: str, number: int, *more: str, expect: int = 0) -> str:
        flags = ["--save_every_n_steps=4", f"--max_train_steps={number}", *more]
        return door.run(line(door, tmp_path / name, *flags, accumulation=1), expect=expect)

    steps("straight", 6, "--epoch_batches=whole")
    steps("first", 4, "--epoch_batches=whole")
    resume = f"--resume={tmp_path / 'first' / 'NAME-step00000004-state'}"
    assert "--epoch_batches=whole" in steps("rest", 6, resume)
    assert losses(tmp_path / "rest") == losses(tmp_path / "straight")[4:]
    # what the user says otherwise is not passed over
    assert "--epoch_batches=whole" in steps("other", 6, resume, "--epoch_batches=every", expect=2)


def test_an_epoch_is_dumped_and_looked_at_in_full(door: Door, tmp_path: Path) -> None:
    text = door.run([*line(door, tmp_path / "out"), "--dry_run"])
    assert re.search(r"steps: \d+ in 3 epochs, 33 samples", text)
    door.run([*line(door, tmp_path / "out"), "--debug_dataset"])
    page = (tmp_path / "out" / "dataset.html").read_text(encoding="utf-8")
    assert Counter(re.findall("not served|starve", page)) == Counter()
