"""Several data sets from kohya's TOML through the door: two sizes, two batches, regularisation, metadata; exact resume."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from doors import Door, losses, metrics, write_pictures
from safetensors.torch import load_file

STEPS, SAVED = 6, 3
WHOLE = "--epoch_batches=whole"  # which may be split into other micro batches


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Data of every kind, and the file that names them; its batch sizes are for so many ranks."""
    root = tmp_path_factory.mktemp("sets")
    write_pictures(root / "train", 9)
    write_pictures(root / "reg", 4)
    write_pictures(root / "meta", 5)
    for text in (root / "meta").glob("*.txt"):
        text.unlink()
    entries = {f"{i:03d}": {"caption": f"meta {i}", "tags": "soft, colours"} for i in range(6)}  # the last is missing
    (root / "meta.json").write_text(json.dumps(entries))

    def write(ranks: int) -> Path:
        path = root / f"{ranks}.toml"
        path.write_text(f"""
[general]
enable_bucket = true
min_bucket_reso = 32
max_bucket_reso = 128
bucket_reso_steps = 32
caption_extension = ".txt"
validation_seed = 2
[[datasets]]
resolution = 64
batch_size = {4 // ranks}
validation_split = 0.2
  [[datasets.subsets]]
  image_dir = "{root / "train"}"
  num_repeats = 2
  shuffle_caption = true
  custom_attributes = {{ origin = "drawn" }}
  [[datasets.subsets]]
  image_dir = "{root / "reg"}"
  is_reg = true
  class_tokens = "picture"
[[datasets]]
resolution = [96, 96]
batch_size = {2 // ranks}
  [[datasets.subsets]]
  image_dir = "{root / "train"}"
  flip_aug = true
  [[datasets.subsets]]
  image_dir = "{root / "meta"}"
  metadata_file = "{root / "meta.json"}"
""")
        return path

    return write


def line(out: Path, *more: str) -> list[str]:
    return [
        "--init_from_config=tiny", f"--output_dir={out}", "--output_name=NAME", f"--max_train_steps={STEPS}", "--seed=1",
        "--learning_rate=1e-4", f"--save_every_n_steps={SAVED}", "--save_state", "--prior_loss_weight=0.5",
        "--max_data_loader_n_workers=0", "--log_every=1", *more,
    ]  # fmt: skip


def assert_goes_on_the_same(whole: Path, resumed: Path) -> None:
    """Hold the end of a resumed run against that of an unbroken one, bit by bit."""
    assert losses(resumed) == losses(whole)[SAVED:]
    assert [m["samples_seen"] for m in metrics(resumed)] == [m["samples_seen"] for m in metrics(whole)][SAVED:]
    a, b = (load_file(folder / "NAME.safetensors") for folder in (whole, resumed))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.flags("dataset_config", "prior_loss_weight")
def test_a_run_of_several_data_sets_resumes_exactly_on_one_and_two_ranks(
    door: Door, sets: Callable[[int], Path], tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    printed = door.run(line(one, WHOLE, f"--dataset_config={sets(1)}"))
    assert re.search("batch: 4, 2 .* x 1 accumulated x 1 rank = 4, 2 images ", printed)
    assert re.search("index: rejected, (no|not an) image: 1", printed)
    taken = np.diff([0, *(m["samples_seen"] for m in metrics(one))]).tolist()
    assert set(taken) == {4, 2} and len(taken) == STEPS
    report = json.loads((one / "report.json").read_text())
    assert report["samples_seen"] == sum(taken)
    assert {name.partition(" of ")[2] for name in report["dataset"]["buckets"]} == {"data set 1", "data set 2"}
    assert report["dataset"]["reg_draws_per_epoch"] > 0 and report["dataset"]["held_out"] > 0
    # the configuration that a run keeps holds all of it: the file is not needed any more
    door.run(
        ["--config=" + str(one / "config.toml"), f"--output_dir={tmp_path / 'again'}",
         f"--resume={one / f'NAME-step{SAVED:08d}-state'}"]
    )  # fmt: skip
    assert_goes_on_the_same(one, tmp_path / "again")

    door.run(line(two, WHOLE, f"--dataset_config={sets(2)}"), ranks=2)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert [m["samples_seen"] for m in metrics(two)] == [m["samples_seen"] for m in metrics(one)]
    state = two / f"NAME-step{SAVED:08d}-state"
    door.run(line(tmp_path / "two again", f"--dataset_config={sets(2)}", f"--resume={state}"), ranks=2)
    assert_goes_on_the_same(two, tmp_path / "two again")


@pytest.mark.flags("reg_data_dir", "prior_loss_weight")
def test_flags_name_regularisation_too(door: Door, sets: Callable[[int], Path], tmp_path: Path) -> None:
    root = sets(1).parent
    for name, source in (("2_shape", "train"), ("1_thing", "reg")):
        shutil.copytree(root / source, tmp_path / name.partition("_")[2] / name)
    common = ["--resolution=64", "--train_batch_size=8", "--max_train_steps=2", "--learning_rate=1e-30"]
    reg = [f"--train_data_dir={tmp_path / 'shape'}", f"--reg_data_dir={tmp_path / 'thing'}", *common]
    printed = door.run(line(tmp_path / "full", *reg, "--prior_loss_weight=1", "--no_metadata"))
    assert re.search("13 records .*, 36 samples ", printed)
    door.run(line(tmp_path / "none", *reg, "--prior_loss_weight=0", "--no_metadata"))
    assert all(0 < none < full for none, full in zip(losses(tmp_path / "none"), losses(tmp_path / "full"), strict=True))


@pytest.mark.flags("dataset_config", "dataset_class")
def test_bad_input_stops_with_every_fault(door: Door, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        '[general]\nflip = true\nkeep_tokens = "1"\n[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "gone"\n'
    )
    said = door.run(line(tmp_path / "out", f"--dataset_config={path}"), expect=2)
    for place in ("[general] flip: ", "mean flip_aug?)", "[general] keep_tokens:",
                  "[[datasets]] 1 [[datasets.subsets]] 1 image_dir: ", "'gone'"):  # fmt: skip
        assert place in said
    said = door.run(line(tmp_path / "out", "--dataset_class=gone.Class", "--resolution=64"), expect=2)
    assert "--dataset_class: gone cannot be" in said and not (tmp_path / "out").exists()
