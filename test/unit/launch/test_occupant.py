"""What a launch finds in its output folder, and what it makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refusals import names

from difftrain.checkpoint import Claim, RunRecord
from difftrain.config import SaveSection, TrainConfig, TrainingSection
from difftrain.config.digest import digest
from difftrain.launch import occupant


def config(output: Path, steps: int = 10) -> TrainConfig:
    return TrainConfig(save=SaveSection(output_dir=str(output)), training=TrainingSection(max_steps=steps))


def record(cfg: TrainConfig, *, finished: bool) -> None:
    cfg.output_dir.mkdir(exist_ok=True)
    run = RunRecord(config_digest=digest(cfg, 1), seed=1, output_name=cfg.save.output_name, total_steps=10)
    (run.ended(10) if finished else run.begun(0, 1)).write(cfg.output_dir)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "0"


def test_nothing_there(output: Path) -> None:
    assert occupant.look(output, config(output), 1) == occupant.Occupant()
    output.mkdir()
    (output / "train_0.log").write_text("an earlier launch that failed at once")
    assert occupant.look(output, config(output), 1) == occupant.Occupant()


def test_an_unfinished_run_of_the_same_configuration_goes_on(output: Path) -> None:
    record(config(output), finished=False)
    found = occupant.look(output, config(output), 1)
    assert not found.in_the_way and "resumed" in found.sentence


@pytest.mark.parametrize(
    ("steps", "finished", "words"),
    [
        (10, True, {"finished"}),
        (20, True, {"finished", "another"}),
        (20, False, {"another"}),
    ],
)
def test_what_must_make_room(output: Path, steps: int, finished: bool, words: set[str]) -> None:
    record(config(output), finished=finished)
    found = occupant.look(output, config(output, steps), 1)
    assert found.in_the_way and not found.running
    assert {"finished", "another", "unfinished"} & set(found.sentence.split()) == words


def test_another_global_batch_is_another_run(output: Path) -> None:
    record(config(output), finished=False)
    assert occupant.look(output, config(output), 2).in_the_way


def test_files_without_a_record(output: Path) -> None:
    output.mkdir()
    (output / "last.safetensors").write_bytes(b"weights")
    assert occupant.look(output, config(output), 1).in_the_way


def test_a_torn_record(output: Path) -> None:
    output.mkdir()
    (output / "run.json").write_text("{")
    found = occupant.look(output, config(output), 1)
    assert found.in_the_way and names(found.sentence, "run.json")


def test_machines_without_rank_0_go_by_their_note(output: Path) -> None:
    output.mkdir()
    occupant.write_note(output, digest(config(output), 1), finished=False)
    assert "resumed" in occupant.look(output, config(output), 1).sentence
    assert occupant.look(output, config(output, 20), 1).in_the_way
    occupant.write_note(output, digest(config(output), 1), finished=True)
    assert occupant.look(output, config(output), 1).in_the_way


def test_a_running_one_is_not_touched(output: Path) -> None:
    record(config(output), finished=False)
    with Claim.acquire(output):
        found = occupant.look(output, config(output), 1)
    assert found.running and not found.in_the_way and names(found.sentence, "process", os.getpid())
    node = output / "node1"
    node.mkdir()
    with Claim.acquire(node):
        assert occupant.look(output, config(output), 1).running
