"""Pictures drawn from modules in training."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import pipeline_of
from PIL import Image
from sdxl import config, loaded

from difftrain.sampling import Prompt, draw_grid, draw_pictures
from difftrain.sampling.draw import drawn_size, grid_of


@cache
def model() -> Any:
    family, parts = loaded(config(prediction_type="v_prediction"))
    return family.drawer(parts)


def test_pictures_are_those_of_diffusers(tmp_path: Path) -> None:
    """A user draws the same picture from the exported model with the same seed."""
    ours = draw_pictures(model(), [Prompt("a red star", seed=7, sample_steps=4)], sampler="euler", seed=0)[0]
    weights = iter(model().parts.root.state_dict().items())
    pipe = pipeline_of(model().family.export(weights, model().parts, "diffusers", tmp_path / "folder"), "sdxl")
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    theirs = pipe("a red star", negative_prompt="", height=64, width=64, num_inference_steps=4, guidance_scale=7.5,
                  generator=generator).images[0]  # fmt: skip
    assert np.abs(np.asarray(ours.image, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1
    assert ours.seed == 7


def test_the_runs_seed_is_the_default_and_repeats() -> None:
    prompts = [Prompt("a", sample_steps=2), Prompt("a", sample_steps=2, seed=9)]
    first = draw_pictures(model(), prompts, sampler="ddim", seed=9)
    assert [p.seed for p in first] == [9, 9]
    assert np.array_equal(np.asarray(first[0].image), np.asarray(first[1].image))


def test_modules_stay_as_they_are(tmp_path: Path) -> None:
    family, parts = loaded(config({"training": {"seed": 1, "mixed_precision": "bf16"}}))
    parts.root.train()
    parts.root.unet.mid_block.eval()
    modes = [m.training for m in parts.root.modules()]
    before = {name: value.clone() for name, value in parts.root.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        draw_grid(
            family.drawer(parts), [Prompt("a", sample_steps=2)], tmp_path, "N", "000001", sampler="euler_a", seed=1
        )
    assert [m.training for m in parts.root.modules()] == modes
    after = parts.root.state_dict()
    assert all(after[name].dtype == value.dtype and after[name].equal(value) for name, value in before.items())
    assert next(parts.frozen["vae"].parameters()).dtype == torch.float32


def test_files_are_named_as_kohya_names_them(tmp_path: Path) -> None:
    prompts = [Prompt("a", sample_steps=1), Prompt("b", sample_steps=1, width=100, height=33, seed=4)]
    grid = draw_grid(model(), prompts, tmp_path / "sample", "stars", "e000002", sampler="ddim", seed=1)
    names = sorted(path.name for path in (tmp_path / "sample").iterdir())
    assert [re.sub(r"\d{14}", "TIME", name) for name in names] == [
        "stars_e000002_00_TIME_1.png",
        "stars_e000002_01_TIME_4.png",
        "stars_e000002_grid.png",
    ]
    assert grid.name == "stars_e000002_grid.png" and Image.open(grid).size == (192, 64)
    assert Image.open(tmp_path / "sample" / names[1]).size == (96, 32)  # down to multiples of 8


def test_sizes_default_to_the_models_own() -> None:
    assert drawn_size(model(), Prompt("a")) == (64, 64)
    assert drawn_size(model(), Prompt("a", width=3, height=79)) == (72, 8)


def test_grids_are_laid_out_row_by_row() -> None:
    images = [Image.new("RGB", (2, 2), (i, 0, 0)) for i in range(5)]
    grid = np.asarray(grid_of(images))[::2, ::2, 0]
    assert grid.tolist() == [[0, 1, 2], [3, 4, 128]]
