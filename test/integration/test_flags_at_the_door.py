"""What the flags of saving, logging, validation and metadata leave behind, seen as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from doors import Door, metrics
from safetensors import safe_open

METADATA = {
    "title": "A title",
    "author": "An author",
    "description": "What this is",
    "license": "Apache-2.0",
    "tags": "soft, small",
    "usage_hint": "say pictures",
    "merged_from": "nothing",
    "trigger_phrase": "soft colours",
    "preprocessor": "none",
    "is_negative_embedding": "false",
}


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def names(out: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in out.glob(pattern))


@pytest.fixture(scope="module")
def epochs(door: Door, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four epochs with what is counted in epochs."""
    out = tmp_path_factory.mktemp("epochs") / "out"
    line = [
        *(f"--metadata_{key}={value}" for key, value in METADATA.items()),
        "--training_comment=a comment",
        "--max_train_epochs=4",
        "--save_every_n_epochs=1",
        "--save_last_n_epochs=3",
        "--save_last_n_epochs_state=2",
        "--save_state_on_train_end",
        "--save_precision=fp16",
        "--use_safetensors",
        f"--console_log_file={out.parent / 'console.txt'}",
        "--console_log_level=WARNING",
        "--console_log_simple",
        "--log_with=tensorboard",
        f"--logging_dir={out.parent / 'events'}",
        "--log_prefix=mine_",
        "--log_tracker_name=project",
        "--log_config",
        "--validation_split=0.2",
        "--validation_seed=3",
        "--validate_every_n_epochs=2",
        "--max_validation_steps=1",
        "--log_every=3",
        "--threads=1",
        "--performance",
    ]
    flags = [
        flag
        for flag in door.flags(out, *line, batch=2)
        if "every_n_steps" not in flag and "max_train_steps" not in flag
    ]
    return out, door.run(flags)


@pytest.mark.flags("save_every_n_epochs", "save_last_n_epochs", "save_last_n_epochs_state", "save_state", "output_name")
@pytest.mark.flags("save_state_on_train_end", "max_train_epochs", "output_dir", "train_batch_size")
def test_epochs_are_saved_and_the_last_ones_kept(epochs: tuple[Path, str]) -> None:
    out, _ = epochs
    assert names(out, "*.safetensors") == [*(f"NAME-00000{n}.safetensors" for n in (1, 2, 3)), "NAME.safetensors"]
    assert names(out, "*-state") == ["NAME-000002-state", "NAME-000003-state", "NAME-state"]
    report = json.loads((out / "report.json").read_text())
    assert report["epochs"] == 4 and report["global_batch"] == 2
    assert metrics(out)[-1]["epoch"] == 4 and metrics(out)[-1]["samples_seen"] == 2 * report["steps"]


@pytest.mark.flags("save_precision", "use_safetensors", "training_comment")
@pytest.mark.flags(
    "metadata_title", "metadata_author", "metadata_description", "metadata_license", "metadata_tags",
    "metadata_usage_hint", "metadata_merged_from", "metadata_trigger_phrase", "metadata_preprocessor",
    "metadata_is_negative_embedding",
)  # fmt: skip
def test_exports_carry_what_was_said_in_the_precision_asked_for(epochs: tuple[Path, str]) -> None:
    out, _ = epochs
    told = header(out / "NAME.safetensors")
    assert {key: told[f"modelspec.{key}"] for key in METADATA} == METADATA
    assert told["ss_training_comment"] == "a comment"
    with safe_open(out / "NAME.safetensors", "pt") as file:
        dtypes = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert torch.float16 in dtypes and torch.float32 not in dtypes


@pytest.mark.flags("console_log_level", "console_log_file", "console_log_simple")
def test_the_console_says_what_matters_enough(epochs: tuple[Path, str], straight: Path) -> None:
    out, printed = epochs
    said = (straight.parent / "console.txt").read_text()
    assert "export NAME" in said and "export NAME" not in printed
    kept = next(out.parent.glob("console*.txt")).read_text()
    assert "export NAME" not in kept


@pytest.mark.flags("log_with", "logging_dir", "log_prefix", "log_tracker_name", "log_config", "log_every")
def test_trackers_get_the_numbers(epochs: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, _ = epochs
    (folder,) = (out.parent / "events").glob("mine_*")
    events = EventAccumulator(str(folder / "project"))
    events.Reload()
    steps = [point.step for point in events.Scalars("loss/current")]
    assert steps == [line["step"] for line in metrics(out)]
    assert all(step % 3 == 0 for step in steps[:-1])
    assert any("config" in name for name in events.Tags()["tensors"])


@pytest.mark.flags("validation_split", "validation_seed", "validate_every_n_epochs", "max_validation_steps")
def test_validation_comes_every_other_epoch(epochs: tuple[Path, str]) -> None:
    out, _ = epochs
    report = json.loads((out / "report.json").read_text())
    found = report["validation"]
    assert len(found) == 2, found
    assert report["dataset"]["held_out"] >= 1
    assert report["config"]["validation"]["seed"] == 3


@pytest.mark.flags("performance", "threads")
def test_a_speed_run_is_named_as_one(epochs: tuple[Path, str]) -> None:
    out, _ = epochs
    assert list(out.rglob("*_perf*")) or "_perf" in (out / "report.json").read_text()
    assert json.loads((out / "report.json").read_text())["config"]["training"]["threads"] == 1


@pytest.mark.flags("save_every_n_steps", "save_last_n_steps", "save_last_n_steps_state", "save_model_as", "no_metadata")
@pytest.mark.flags("validate_every_n_steps", "save_n_epoch_ratio")
def test_steps_are_saved_and_the_last_ones_kept(door: Door, tmp_path: Path) -> None:
    out = tmp_path / "steps"
    line = ["--save_every_n_steps=1", "--save_last_n_steps=3", "--save_last_n_steps_state=2", "--no_metadata"]
    line += ["--save_model_as=ckpt", "--validation_split=0.2", "--validate_every_n_steps=2"]
    door.run(door.flags(out, *line, steps=6))
    assert names(out, "*.ckpt") == [f"NAME-step{step:08d}.ckpt" for step in (3, 4, 5, 6)] + [
        "NAME.ckpt"
    ]  # kohya's window
    assert names(out, "*-state") == ["NAME-state", *(f"NAME-step0000000{n}-state" for n in (4, 5, 6))]
    found = json.loads((out / "report.json").read_text())["validation"]
    assert [each["step"] for each in found] == [2, 4, 6]
    other = tmp_path / "ratio"
    flags = door.flags(other, "--max_train_epochs=6", "--save_n_epoch_ratio=3", "--no_metadata")
    door.run([flag for flag in flags if "n_steps" not in flag and "max_train_steps" not in flag])
    assert names(other, "*.safetensors") == ["NAME-000002.safetensors", "NAME-000004.safetensors", "NAME.safetensors"]
    told = header(
        other / "NAME.safetensors"
    )  # the sizes of a model of ours stay: without them it could not be read again
    assert set(told) <= {"format", "difftrain.architecture"}


WITHOUT_ITS_READER = """
import runpy, sys
from pathlib import Path
import difftrain.train.run as run

source = Path(run.__file__).read_text()
reader = "    if cfg.training.threads:\\n        torch.set_num_threads(cfg.training.threads)\\n"
assert reader in source
exec(compile(source.replace(reader, ""), run.__file__, "exec"), vars(run))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.flags("dry_run")
def test_a_dry_run_writes_nothing_but_the_index(pictures: Path, tmp_path: Path) -> None:
    own = Door(pictures, tmp_path / "cache")
    printed = own.run(own.flags(tmp_path / "out", "--dry_run=full"))
    assert printed.rstrip().splitlines()[-1].startswith("dry run: ")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.flags("threads")
def test_a_flag_that_nothing_reads_stops_the_run_before_its_first_step(door: Door, tmp_path: Path) -> None:
    """The fault is planted: the lines that read it are taken out."""
    command = door.command(door.flags(tmp_path / "out", "--threads=2", "--lr_scheduler=cosine"))
    printed = door.run_words([command[0], "-c", WITHOUT_ITS_READER, *command[1:]], expect=2)
    assert "--threads: " in printed and "--lr_scheduler" not in printed and "step_loss=" not in printed
    assert not (tmp_path / "out" / "NAME.safetensors").exists()
