"""The accelerate engine through the door, on two ranks: the losses of the native engine, and one format of states."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from doors import Door, losses
from PIL import Image
from safetensors.torch import load_file

STEPS = 6
WHOLE = "--epoch_batches=whole"  # which two ranks may split into micro batches of half the size


@pytest.mark.flags("engine")
def test_fairscale_in_half_precision_through_accelerate(door: Door, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = ("--engine=accelerate", "--optimizer_type=oss", "--mixed_precision=fp16")  # the launchers' defaults
    said = door.run(door.flags(out, WHOLE, *line, batch=1, steps=STEPS), ranks=2)
    assert said.count("fairscale 0.4.13 is patched in this process") == 1
    assert said.count("accelerate 1.15.0 is patched in this process") == 1
    assert losses(out) == pytest.approx(losses(straight)[:STEPS], rel=2e-3)
    about = json.loads((out / "NAME-step00000004-state" / "engine.json").read_text())
    assert about["engine"] == "accelerate" and about["scaler"]["scale"] == 65536.0
    parts = sorted(path.name for path in (out / "NAME-state").glob("optimizer-*"))
    assert parts == ["optimizer-00000.safetensors", "optimizer-00001.safetensors"]  # a share on each rank


@pytest.mark.flags("deepspeed", "zero_stage")
def test_deepspeed_trains_the_same_and_one_process_of_accelerate_goes_on(
    door: Door, straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "zero"
    said = door.run(door.flags(out, WHOLE, "--deepspeed", "--zero_stage=2", batch=1, steps=STEPS), ranks=2)
    assert said.count("--deepspeed: takes --engine=accelerate") == 1
    assert losses(out) == pytest.approx(losses(straight)[:STEPS], rel=1e-6)
    state = out / "NAME-step00000004-state"
    door.run(door.flags(tmp_path / "plain", "--engine=accelerate", f"--resume={state}", steps=STEPS))
    assert losses(tmp_path / "plain") == pytest.approx(losses(out)[4:], rel=1e-6)


def test_with_weights_in_pieces_reports_and_exports_are_whole(door: Door, straight: Path, tmp_path: Path) -> None:
    line = ("--deepspeed", "--zero_stage=3", "--mixed_precision=bf16", "--use_ema", "--save_every_n_steps=100")
    door.run(door.flags(tmp_path / "out", WHOLE, *line, batch=1, steps=2), ranks=2)
    assert losses(tmp_path / "out") == pytest.approx(losses(straight)[:2], rel=2e-2)
    found, expected = (json.loads((out / "report.json").read_text()) for out in (tmp_path / "out", straight))
    assert found["parameters"] == expected["parameters"]
    exported, averaged = (load_file(tmp_path / "out" / f"{name}.safetensors") for name in ("NAME", "NAME-ema"))
    native = load_file(straight / "NAME.safetensors")
    for each in (exported, averaged):
        assert {name: (value.shape, value.dtype) for name, value in each.items()} == {
            name: (value.shape, value.dtype) for name, value in native.items()
        }
    assert any((exported[name] != averaged[name]).any() for name in native)


@pytest.mark.flags("engine", "shard_size")
def test_fsdp_trains_draws_and_exports_the_same_and_the_native_engine_goes_on(
    door: Door, straight: Path, tmp_path: Path
) -> None:
    prompts, out, plain = tmp_path / "prompts.txt", tmp_path / "out", tmp_path / "plain"
    prompts.write_text("a cat --w 64 --h 64 --s 2 --d 3\n")
    drawn = (f"--sample_prompts={prompts}", "--sample_every_n_steps=4", "--use_ema", "--ema_decay=0.5", WHOLE)
    said = door.run(door.flags(out, *drawn, "--engine=fsdp", batch=1, steps=STEPS), ranks=2)
    assert "Warning" not in said and losses(out) == pytest.approx(losses(straight)[:STEPS], rel=1e-6)
    state = out / "NAME-step00000004-state"
    assert json.loads((state / "engine.json").read_text())["engine"] == "fsdp"
    for kind in ("weights", "optimizer", "ema"):  # each rank has written its rows
        sizes = [(state / f"{kind}-{rank:05d}.safetensors").stat().st_size for rank in (0, 1)]
        assert min(sizes) > 0.8 * max(sizes)

    # one process of the native engine goes on, and draws and exports the same
    door.run(door.flags(plain, *drawn, f"--resume={state}", steps=STEPS))
    assert losses(plain) == pytest.approx(losses(out)[4:], rel=1e-6)
    for name in ("NAME", "NAME-ema"):
        one, other = (load_file(folder / f"{name}.safetensors") for folder in (out, plain))
        assert all((one[key].float() - other[key].float()).abs().max() <= 1e-4 for key in one.keys() | other.keys())
    pictures = [Image.open(next((folder / "sample").glob("*000006*grid.png"))) for folder in (out, plain)]
    assert max(abs(np.subtract(*(np.asarray(each, dtype=np.int16) for each in pictures))).ravel()) <= 2
    assert len(list((out / "sample").glob("*.png"))) == 4  # two prompts' grids and pictures: one rank writes
