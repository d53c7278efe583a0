"""Optimizers in whole runs: rates for each block, estimated rates, and averages that are exported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from doors import Door, metrics
from safetensors.torch import load_file

BLOCKS = [1.0] * 17  # of the tiny size
BLOCKS[0] = BLOCKS[8] = BLOCKS[16] = 0.0
FROZEN = ("time_embed.", "label_emb.", "middle_block.1.", "out.")


@pytest.mark.nightly
@pytest.mark.flags("block_lr", "optimizer_type", "optimizer_args")
def test_prodigy_with_frozen_blocks_stops_and_goes_on(door: Door, tmp_path: Path) -> None:
    line = ["--block_lr=" + ",".join(map(str, BLOCKS)), "--optimizer_type=prodigy", "--learning_rate=1"]
    line += ["--optimizer_args", "d0=1e-5", "--gradient_checkpointing", "--save_every_n_steps=2"]
    out, again = tmp_path / "out", tmp_path / "again"
    said = door.run(door.flags(out, *line, steps=4))
    assert "UNet blocks 0, 8, 16 are frozen" in said and "adapted=0.00001 " in said
    told = metrics(out)
    assert set(told[0]["lrs"]) == {f"block{i}" for i, rate in enumerate(BLOCKS) if rate}
    assert told[0]["d"] == 1e-5 <= told[-1]["d"]
    early, late = (load_file(out / f"NAME{step}.safetensors") for step in ("-step00000002", ""))
    unet = {name.removeprefix("model.diffusion_model."): name for name in early if name.startswith("model.")}
    moved = {short for short, name in unet.items() if not torch.equal(early[name], late[name])}
    assert moved and not any(name.startswith(FROZEN) for name in moved)
    assert {name for name in unet if not name.startswith(FROZEN)} == moved
    door.run([*door.flags(again, *line, steps=4), f"--resume={out / 'NAME-step00000002-state'}"])
    assert all(torch.equal(tensor, late[name]) for name, tensor in load_file(again / "NAME.safetensors").items())


@pytest.mark.flags("optimizer_type")
def test_a_schedule_free_run_exports_its_average_and_validates_with_it(door: Door, tmp_path: Path) -> None:
    line = [
        "--optimizer_type=AdamWScheduleFree",
        "--learning_rate=1e-3",
        "--validation_split=0.2",
        "--lr_warmup_steps=2",
    ]
    line += ["--validate_every_n_steps=2", "--save_every_n_steps=4", "--save_model_as=safetensors"]
    out = tmp_path / "out"
    said = door.run(door.flags(out, *line, steps=4))
    assert re.search(r"--lr_\w+.* has no .*schedule-free", said)
    assert {each["lr"] for each in metrics(out)} == {1e-3}
    state = out / "NAME-step00000004-state"
    y, kept = load_file(state / "weights-00000.safetensors"), load_file(state / "optimizer-00000.safetensors")
    used = load_file(out / "NAME.safetensors")
    name, key = "unet.conv_in.weight", "model.diffusion_model.input_blocks.0.0.weight"
    x = y[name].lerp(kept[f"{name}/z"], 1 - 1 / 0.9)
    assert torch.equal(used[key], x) and not torch.equal(x, y[name])
