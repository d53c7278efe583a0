"""The launchers' own flags: spellings, shell variables, and what goes on to the training script."""

from __future__ import annotations

import pytest
from refusals import is_about, names

from difftrain.launch import flags


def read(*argv: str, **environ: str) -> flags.LaunchFlags:
    return flags.read(list(argv), environ)


def test_both_spellings_and_the_rest() -> None:
    given = read("--batch_size=8", "--nproc_per_node", "2", "--lr_scheduler", "cosine", "--sdpa")
    assert given.values == {"batch_size": 8, "nproc_per_node": 2}
    assert given.remaining == ["--lr_scheduler", "cosine", "--sdpa"] and not given.faults
    assert given.names_rest() == {"lr_scheduler", "sdpa"}
    assert flags.to_door(given) == ["--train_batch_size=8"]


@pytest.mark.parametrize(
    ("word", "door"),
    [
        ("--model_name=m", "--pretrained_model_name_or_path=m"),
        ("--pretrain_model_path=m", "--pretrained_model_name_or_path=m"),
        ("--dataset_name=d", "--train_data_dir=d"),
        ("--vae_model_path=v", "--vae=v"),
        ("--max_train_epoch=13", "--max_train_epochs=13"),
        ("--max_train_epochs=13", "--max_train_epochs=13"),
        ("--resolution=512,768", "--resolution=512,768"),
        ("--tokenizer1_path=t", "--tokenizer1_path=t"),
        ("--performance", "--performance"),
        ("--dry_run", "--dry_run"),
    ],
)
def test_translation(word: str, door: str) -> None:
    assert flags.to_door(read(word)) == [door]


def test_shell_variables_count_below_the_command_line() -> None:
    given = read("--batch_size=2", batch_size="8", mixed_precision="bf16", unrelated="x")
    assert given.values == {"batch_size": 2, "mixed_precision": "bf16"}
    assert names(given.origins["mixed_precision"], "variable mixed_precision")


def test_aliases_work_as_shell_variables() -> None:
    assert read(pretrain_model_path="m").values == {"model_name": "m"}


def test_switches_can_be_turned_off() -> None:
    assert flags.to_door(read("--performance=false")) == []
    assert flags.to_door(read("--performance", "--dry_run=1")) == ["--performance", "--dry_run"]


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("--batch_size=eight", ["--batch_size", "whole number", "'eight'"]),
        ("--batch_size=", ["--batch_size", "empty"]),
        ("--model_name", ["--model_name", "missing"]),
        ("--performance=perhaps", ["--performance", "switch", "'perhaps'"]),
    ],
)
def test_faults_name_flag_and_value(word: str, facts: list[str]) -> None:
    assert is_about(read(word).faults[0], *facts)


def test_all_faults_are_reported_at_once() -> None:
    assert len(read("--batch_size=x", "--nnodes=y", "--device_id=").faults) == 3


def test_usage_names_every_flag() -> None:
    for caller in (flags.SCRIPTS, flags.COMMAND):
        text = flags.usage("bash x.sh", "sdxl", caller)
        assert all(f"--{name}" in text for flag in flags.OWNED for name in flag.names)
        assert names(text, "bash x.sh", caller.door % "sdxl")
