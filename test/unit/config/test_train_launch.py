"""What launchers hand to train.py: --deepspeed with its JSON, --local_rank, --master_port."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from refusals import is_about, names

from difftrain.config.parse_flags import Parsed
from difftrain.config.parse_keys import parse
from difftrain.contracts import ConfigFault, Fault
from difftrain.testing.pictures import write_folder

FILE = """
output_dir = "out"
dataset = "dataset.toml"
epochs = 1
micro_batch_size_per_gpu = 2
gradient_clipping = 0.5
[model]
type = "sdxl"
init_from_config = "tiny"
dtype = "bfloat16"
"""
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in LAUNCH:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    write_folder(tmp_path / "pictures", [(64, 64)])
    (tmp_path / "dataset.toml").write_text("resolutions = [64]\n[[directory]]\npath = 'pictures'\n")
    (tmp_path / "run.toml").write_text(FILE)
    return tmp_path


def run(*argv: str) -> Parsed:
    return parse(["--config=run.toml", *argv])


def with_json(**told: Any) -> Parsed:
    Path("ds.json").write_text(json.dumps(told))
    return run("--deepspeed", "--deepspeed_config=ds.json")


def wrong(**told: Any) -> list[Fault]:
    with pytest.raises(ConfigFault) as caught:
        with_json(**told)
    return caught.value.faults


def test_deepspeed_alone_runs_natively_and_says_so() -> None:
    parsed = run("--deepspeed")
    assert parsed.config.training.engine == "native" and not parsed.config.deepspeed.enable
    assert any(is_about(note, "--deepspeed", "deepspeed", "natively") for note in parsed.notes)
    Path("run.toml").write_text(FILE + '[engine]\ntype = "deepspeed"\n')
    assert any("engine = deepspeed" in note and "natively" in note for note in run().notes)


@pytest.mark.parametrize(
    "told", [{}, {"zero_optimization": {"stage": 0}}, {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 5}]
)
def test_a_json_without_a_stage_runs_natively(told: dict[str, Any]) -> None:
    cfg = with_json(**told).config
    assert cfg.training.engine == "native" and cfg.logging.log_every == told.get("steps_per_print", 1)


def test_a_zero_stage_is_run_by_accelerates_plugin() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
            "offload_param": {"device": "none"}, "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
    parsed = with_json(zero_optimization=zero, bf16={"enabled": True}, train_batch_size="auto", optimizer="auto")
    section = parsed.config.deepspeed
    assert parsed.config.training.engine == "accelerate" and section.enable and section.zero_stage == 3
    assert (
        section.offload_optimizer_device == "cpu" and section.offload_param_device is None and section.zero3_save_16bit
    )
    assert any(is_about(note, "zero_optimization.overlap_comm", "accelerate's") for note in parsed.notes)


@pytest.mark.parametrize(
    ("told", "facts"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, ["train_micro_batch_size_per_gpu", "contradicts", "4", "2"]),
        ({"gradient_clipping": 1.0}, ["gradient_clipping", "contradicts", "1", "0.5"]),
        ({"fp16": {"enabled": True}}, ["fp16.enabled", "bf16", "run.toml [model] dtype"]),
        ({"bf16": {"enabled": False}}, ["bf16.enabled", "dtype", "bf16"]),
        ({"optimizer": {"type": "OneBitAdam"}}, ["optimizer.type", "OneBitAdam", "AdamW"]),
        ({"zero_optimisation": {"stage": 1}}, ["zero_optimisation", "zero_optimization"]),
        ({"zero_optimization": {"stage": 1, "stagee": 2}}, ["zero_optimization.stagee", "stage"]),
        ({"zero_optimization": {"stage": 7}}, ["zero_optimization.stage", "0, 1, 2, 3", "7"]),
    ],
)
def test_what_the_json_must_not_say(told: dict[str, Any], facts: list[str]) -> None:
    found = wrong(**told)
    assert any(is_about(fault, *facts) and "ds.json" in fault.where for fault in found), found


def test_a_json_that_cannot_be_read() -> None:
    Path("ds.json").write_text("{")
    for name, fact in (("nowhere.json", "file"), ("ds.json", "line 1")):
        with pytest.raises(ConfigFault) as caught:
            run(f"--deepspeed_config={name}")
        (fault,) = caught.value.faults
        assert is_about(fault, f"--deepspeed_config={name}", "JSON", fact)


def test_what_the_environment_lacks_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    parsed = run("--local_rank=1", "--master_port", "29511")
    assert os.environ["LOCAL_RANK"] == "1" and os.environ["MASTER_PORT"] == "29511"
    assert any(is_about(note, "--local_rank", "LOCAL_RANK=1") for note in parsed.notes)
    assert any(is_about(note, "--master_port", "MASTER_PORT=29511") for note in parsed.notes)


def test_what_the_environment_has_is_not_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCH, ("1", "1", "2", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert not [note for note in run("--local_rank=1", "--master_port=29500").notes if "local_rank" in note]
    with pytest.raises(ConfigFault) as caught:
        run("--local_rank=0", "--master_port=1")
    for option, said in (
        ("--local_rank", "0 contradicts LOCAL_RANK=1"),
        ("--master_port", "1 contradicts MASTER_PORT=29500"),
    ):
        assert any(is_about(fault, option, said) for fault in caught.value.faults), caught.value


def test_a_single_process_has_no_local_rank() -> None:
    assert any(is_about(note, "--local_rank", "no effect", "single process") for note in run("--local_rank=0").notes)
    assert not [note for note in run("--local_rank=-1").notes if "local_rank" in note]
    with pytest.raises(ConfigFault) as caught:
        run("--local_rank=1")
    (fault,) = caught.value.faults
    assert is_about(fault, "--local_rank", "1", "RANK", "WORLD_SIZE")


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("--dry_run=1", ["--dry_run", "no value", "1"]),
        ("--dataset", ["--dataset", "missing"]),
        ("--training.max_steps", ["--training.max_steps", "missing"]),
        ("--max_steps=1", ["--max_steps", "--training.max_steps"]),
        ("--cach_only", ["--cach_only", "--cache_only"]),
        ("--optimizer.type", ["--optimizer.type", "missing"]),
    ],
)
def test_command_lines_that_make_no_sense(word: str, facts: list[str]) -> None:
    with pytest.raises(ConfigFault) as caught:
        run(word)
    assert any(is_about(fault, *facts) for fault in caught.value.faults), caught.value


def test_options_that_set_fields() -> None:
    cfg = run("--cache_only", "--i_know_what_i_am_doing", "--dataset", "dataset.toml").config
    assert cfg.cache.only and cfg.cache.latents_to_disk and cfg.cache.text_to_disk
    assert cfg.training.only_warn and cfg.data.max_rejected_share == 1.0
    cfg = run("--resume_from_checkpoint", "--reset_dataloader", "--reset_optimizer").config
    assert cfg.save.resume == "latest" and cfg.save.reset_dataloader and cfg.save.reset_optimizer
    assert run("--resume_from_checkpoint=40", "--reset_optimizer_params").config.save.resume == "40"
    assert run("--dry_run").dry_run and run("--dump_dataset=x").bare["dump_dataset"] == "x"


def test_a_constant_rate_goes_with_a_resume_that_comes_by_itself() -> None:
    """It goes on only where the rate is the same, so that nothing of the optimizer is to be begun anew."""
    rate = "--training.force_constant_lr=1e-5"
    for resume, anew in (("auto", False), ("latest", True)):
        cfg = run(f"--resume_from_checkpoint={resume}", rate).config
        assert cfg.optimizer.learning_rate == 1e-5 and cfg.save.reset_optimizer_params is anew


def test_a_file_that_cannot_be_read_lacks_nothing_else() -> None:
    Path("torn.toml").write_text("a = [")
    for name, fact in (("none.toml", "file"), ("torn.toml", "TOML"), (".", "TOML")):
        with pytest.raises(ConfigFault) as caught:
            parse([f"--config={name}"])
        (fault,) = caught.value.faults
        assert fault.where == f"--config={name}" and names(fault.what, fact)
