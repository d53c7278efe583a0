"""train.py as people start it: one trainer with sdxl_pretrain.py, under every launcher, from any folder."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from doors import ROOT, Door, losses

TRAIN = ROOT / "sd_scripts_xl" / "train.py"
STEPS = 3
# the contract line of sdxl_pretrain.py, as sections
SAME = """
[output]
output_dir = "{out}"
[model]
type = "sdxl"
init_from_config = "tiny"
[data]
dirs = ["{data}"]
resolution = [64, 64]
enable_bucket = true
min_bucket_reso = 32
max_bucket_reso = 128
[training]
micro_batch_size_per_gpu = 2
max_steps = 12
seed = 1
[optimizer]
type = "adamw"
lr = 1e-4
[monitoring]
steps_per_print = 1
"""
# as diffusion-pipe's users write it
FLAT = """
output_dir = "out"
dataset = "data.toml"
epochs = 5
max_steps = 3
micro_batch_size_per_gpu = 2
gradient_accumulation_steps = 1
gradient_clipping = 1.0
seed = 1
save_every_n_epochs = 1
pipeline_stages = 1
[model]
type = "sdxl"
init_from_config = "tiny"
dtype = "float32"
[optimizer]
type = "adamw"
lr = 1e-4
betas = [0.9, 0.999]
weight_decay = 0.01
[monitoring]
wandb_api_key = "0123456789abcdef0123"
"""


@pytest.fixture
def recipe(door: Door, tmp_path: Path) -> Path:
    """Return a folder with a flat file and its data set, whose paths are relative to it."""
    (tmp_path / "data.toml").write_text("resolutions = [64]\n[[directory]]\npath = 'pictures'\n")
    (tmp_path / "pictures").symlink_to(door.data)
    (tmp_path / "run.toml").write_text(FLAT)
    return tmp_path


def run_dir(out: Path) -> Path:
    """Return the one folder that a run made."""
    (found,) = (path for path in out.iterdir() if path.is_dir())
    return found


def train(door: Door, *argv: object, expect: int = 0, before: tuple[str, ...] = (sys.executable,), **env: str) -> str:
    return door.run_words([*before, str(TRAIN), *map(str, argv)], expect, **env)


def torchrun(ranks: int) -> tuple[str, ...]:
    words = (sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=0")
    return (*words, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def test_one_trainer_two_spellings(door: Door, straight: Path, tmp_path: Path) -> None:
    """The step losses of both doors are the same to the last bit."""
    path = tmp_path / "same.toml"
    path.write_text(SAME.format(out=tmp_path / "out", data=door.data))
    train(door, "--config", path)
    made = run_dir(tmp_path / "out")
    assert losses(made) == losses(straight) and len(losses(made)) == 12
    assert (made / "report.json").exists() and (made / "global_step12").is_dir()


def test_a_data_sets_file_is_the_folder_of_the_flags(door: Door, recipe: Path, tmp_path: Path) -> None:
    train(door, "--config", recipe / "run.toml", "--output.output_dir", tmp_path / "out")
    line = ["--init_from_config=tiny", f"--train_data_dir={door.data}", f"--output_dir={tmp_path / 'flags'}", "--seed=1",
            "--resolution=64,64", "--train_batch_size=2", f"--max_train_steps={STEPS}", "--learning_rate=1e-4", "--log_every=1"]  # fmt: skip
    door.run(line)
    made = run_dir(tmp_path / "out")
    assert losses(made) == losses(tmp_path / "flags") and len(losses(made)) == STEPS
    kept = {name: (made / name).read_text() for name in ("config.toml", "dataset.toml", "run.json", "report.json")}
    assert kept["dataset.toml"] == (recipe / "data.toml").read_text()
    assert not any("0123456789abcdef0123" in text for text in kept.values())
    assert json.loads(kept["report.json"])
    # a run's own record is a --config
    train(door, "--config", made / "config.toml", "--output.output_dir", tmp_path / "again")
    assert losses(run_dir(tmp_path / "again")) == losses(made)


def launched(name: str) -> tuple[str, ...]:
    folder = Path(sys.executable).parent
    return {
        "torchrun": torchrun(2),
        "accelerate": (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
                       "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
        "deepspeed": (str(folder / "deepspeed"), "--num_gpus=2", "--master_port=29517"),
    }[name]  # fmt: skip


@pytest.mark.nightly
def test_every_launcher_starts_it(door: Door, recipe: Path) -> None:
    """Two processes of each launcher train what one does with twice the batch; all of them alike to the last bit."""
    there = recipe / "run.toml"
    train(door, "--config", there, f"--output.output_dir={recipe / 'plain'}")
    found = {}
    for name in ("torchrun", "accelerate", "deepspeed"):
        if find_spec("deepspeed" if name == "deepspeed" else "accelerate") is None:
            continue
        out = recipe / name
        argv = (
            "--deepspeed",
            "--config",
            there,
            f"--output.output_dir={out}",
            "--training.micro_batch_size_per_gpu",
            "1",
        )
        said = train(door, *argv, before=launched(name))
        assert said.count("--deepspeed: the deepspeed") == 1
        assert said.count("wandb_api_key: ") == 1 and "0123456789abcdef0123" not in said
        found[name] = losses(run_dir(out))
    assert found["torchrun"] == pytest.approx(losses(run_dir(recipe / "plain")), rel=1e-6)
    assert all(each == found["torchrun"] for each in found.values())


def test_from_inside_the_folder_of_the_doors(door: Door, recipe: Path) -> None:
    """`cd sd_scripts_xl; python train.py`, and the cache stage before training, as people type it."""
    cached = "\n[cache]\ncaching_batch_size = 4\n[data]\ncache_dir = 'cache'\n"
    (recipe / "run.toml").write_text(FLAT + cached)
    (recipe / "cache").mkdir()
    words = [sys.executable, TRAIN.name, "--config", str(recipe / "run.toml"), f"--output.output_dir={recipe / 'out'}"]
    said = door.run_words([*words, "--cache_only"], cwd=TRAIN.parent)
    assert "on disk" in said and not (recipe / "out").exists() and any((recipe / "cache").iterdir())
    door.run_words([*words, "--trust_cache"], cwd=TRAIN.parent)
    assert len(losses(run_dir(recipe / "out"))) == STEPS


def test_a_dry_run_says_all_that_is_wrong(door: Door, recipe: Path) -> None:
    said = train(door, "--config", recipe / "run.toml", "--dry_run")
    assert "dry run: " in said and not (recipe / "out").exists()
    bad = (recipe / "run.toml").read_text().replace("seed = 1", "sed = 1\nepochs_ = 2\nupload_hf_from_epoch = 3")
    (recipe / "bad.toml").write_text(bad)
    said = train(door, "--config", recipe / "bad.toml", "--dry_run", "--optimizer.type=AdamWW", expect=2)
    for what in ("4 faults", "sed: ", "mean seed?)", "epochs_: ", "upload_hf_from_epoch", "AdamWW"):
        assert what in said


def test_three_processes_for_two_stages(door: Door, recipe: Path) -> None:
    said = train(
        door, "--config", recipe / "run.toml", "--optimization.pipeline_stages=2", before=torchrun(3), expect=1
    )
    assert "pipeline_stages: 2 stages" in said
    assert "3 processes cannot be" in said


def test_a_half_set_environment_is_named(door: Door, recipe: Path) -> None:
    said = train(door, "--config", recipe / "run.toml", expect=2, RANK="0", LOCAL_RANK="0")
    assert "RANK=0, LOCAL_RANK=0 set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing" in said
    assert not os.path.exists(recipe / "out")  # noqa: PTH110


def test_the_preset_door(door: Door, recipe: Path) -> None:
    """sd3_light_pretrain.py is for one model, and says so of another."""
    light = TRAIN.with_name("sd3_light_pretrain.py")
    said = door.run_words([sys.executable, str(light), "--config", str(recipe / "run.toml")], expect=2)
    assert "'sdxl' contradicts" in said or "sdxl contradicts" in said
