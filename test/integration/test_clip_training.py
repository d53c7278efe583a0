"""A model of clips trains on videos among images: cached as online, killed and resumed to the bit, on two ranks as on one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from clip_files import numbered, numbered_bytes
from doors import KILLED_AT, Door, losses
from PIL import Image
from run_dirs import TRAIN, only, runs, tensors

FILE = """
[output]
output_dir = "{out}"
dataset = "{data}"
[training]
seed = 1
max_steps = 12
micro_batch_size_per_gpu = {batch}
image_micro_batch_size_per_gpu = {images}
[model]
type = "wan"
init_from_config = "tiny"
dtype = "float32"
t5_max_length = 8
[optimizer]
type = "adamw"
lr = 1e-4
[data]
num_dataloader_workers = 0
cache_dir = "{cache}"
[cache]
latents_to_disk = {cached}
text_to_disk = {cached}
[save]
checkpoint_every_n_minutes = 1e-6
save_every_n_epochs = 1
[monitoring]
logging_steps = 1
"""
DATA = """
resolutions = [48]
frame_buckets = [1, 5, 9]
framerate = 8
video_clip_mode = "multiple_overlapping"
[[directory]]
path = "{folder}"
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of three lengths among images: 14 samples in an epoch, in three buckets."""
    folder = tmp_path_factory.mktemp("clips")
    videos = folder / "videos"
    videos.mkdir()
    for number, count in enumerate((9, 6, 20, 12)):
        (videos / f"{number}.mp4").write_bytes(numbered_bytes(count, fps=8))
        Image.fromarray(numbered(100 + number)).save(videos / f"still{number}.png")
        for name in (f"{number}", f"still{number}"):
            (videos / f"{name}.txt").write_text(f"what {name} shows")
    (folder / "data.toml").write_text(DATA.format(folder=videos))
    return folder


def words(data: Path, name: str, *, cached: bool, batch: int = 2) -> list[str]:
    path = data / f"{name}.toml"
    values = {"out": data / name, "data": data / "data.toml", "cache": data / "cache", "cached": str(cached).lower()}
    path.write_text(FILE.format(batch=batch, images=2 * batch, **values))
    return [str(TRAIN), f"--config={path}"]


@pytest.fixture(scope="module")
def online(data: Path) -> Path:
    Door(data, data / "user").run_words([sys.executable, *words(data, "online", cached=False)])
    return only(data / "online")


def test_cached_clips_train_as_decoded_ones_and_resume_to_the_bit(data: Path, online: Path) -> None:
    door = Door(data, data / "user")
    line = words(data, "cached", cached=True)
    door.run_words([sys.executable, str(KILLED_AT), "6", *line], expect=None)
    assert len(losses(only(data / "cached"))) == 6
    output = door.run_words([sys.executable, *line, "--resume_from_checkpoint=latest"])
    assert "resuming" in output and len(runs(data / "cached")) == 1, output
    assert losses(only(data / "cached")) == pytest.approx(losses(online), rel=1e-5)

    whole = words(data, "whole", cached=True)
    assert "all" in door.run_words([sys.executable, *whole])  # of the cache nothing is made again
    assert losses(only(data / "whole")) == losses(only(data / "cached"))
    ours, theirs = (tensors(only(data / name) / "global_step12") for name in ("whole", "cached"))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)


def test_two_ranks_take_the_same_clips(data: Path, online: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d"]
    line = [*run, "--rdzv-endpoint=localhost:0", *words(data, "ranks", cached=False, batch=1)]
    Door(data, data / "user").run_words(line)
    assert losses(only(data / "ranks")) == pytest.approx(losses(online), rel=1e-6)
