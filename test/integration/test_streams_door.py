"""train.py reads tars and folders as a stream: the same global batches, so the same losses, on one rank and on three."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from doors import ROOT, Door, write_pictures

from difftrain.testing.pictures import write_tar

TRAIN = ROOT / "sd_scripts_xl" / "train.py"
RUN = """
output_dir = "out"
dataset = "data.toml"
epochs = 3
max_steps = 9
micro_batch_size_per_gpu = 6
seed = 1
save_every_n_epochs = 3
sd3_streaming_dataset = true
sd3_shard_size = 4
num_dataloader_workers = 1
[model]
type = "sdxl"
init_from_config = "tiny"
[optimizer]
type = "adamw"
lr = 1e-4
[monitoring]
steps_per_print = 1
"""
DATA = """
size_buckets = [[64, 64, 1], [96, 64, 1], [64, 96, 1]]
[[directory]]
path = "pictures"
num_repeats = 1.5
default_mask_file = "pictures/000.png"
[[directory]]
path = "tars"
caption_prefix = "of a tar: "
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "pictures", 9)
    for number in range(4):
        write_tar(tmp_path / "tars" / f"{number}.tar", [(64, 64)] * 4 + [(96, 60)] * 2, start=10 * number)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "data.toml").write_text(DATA)
    return tmp_path


def losses(door: Door, place: Path, out: str, ranks: int) -> list[float]:
    words = [sys.executable]
    if ranks > 1:
        words += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv-backend=c10d"]
        words += ["--rdzv-endpoint=localhost:0", "--master_port=0"]
    more = [f"--training.micro_batch_size_per_gpu={6 // ranks}", f"--output.output_dir={place / out}"]
    door.run_words([*words, str(TRAIN), "--config", str(place / "run.toml"), *more], 0)
    (found,) = (place / out).glob("2*/metrics.jsonl")
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    return [line["step_loss"] for line in lines if "step_loss" in line]


def test_a_stream_gives_the_same_losses_on_one_rank_and_on_three(door: Door, place: Path) -> None:
    one, three = losses(door, place, "one", 1), losses(door, place, "three", 3)
    assert len(one) == 9 and three == pytest.approx(one, rel=1e-6)
