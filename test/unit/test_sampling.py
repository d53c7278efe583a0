"""Sample prompts, samplers, and pictures drawn from modules in training."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sdxl import config, loaded

from difftrain.contracts import ConfigFault
from difftrain.sampling import SAMPLERS, Prompt, draw_grid, draw_pictures, make_sampler, parse_line, parse_prompts
from difftrain.sampling.grid import grid_of, size_of
from difftrain.sampling.samplers import sampler_fault

KOHYA = json.loads((Path(__file__).parent / "data" / "kohya_sample_prompts.json").read_text())
# the sixteen choices of --sample_sampler
NAMES = [
    "ddim",
    "pndm",
    "lms",
    "euler",
    "euler_a",
    "heun",
    "dpm_2",
    "dpm_2_a",
    "dpmsolver",
    "dpmsolver++",
    "dpmsingle",
    "k_lms",
    "k_euler",
    "k_euler_a",
    "k_dpm_2",
    "k_dpm_2_a",
]


@cache
def pipeline() -> Any:
    family, parts = loaded(config(prediction_type="v_prediction"))
    return family.pipeline(parts)


@cache
def drawn(name: str) -> np.ndarray:
    prompt = Prompt("a red star", sample_steps=25, scale=1.5, seed=3)
    return np.asarray(draw_pictures(pipeline(), [prompt], sampler=name, seed=0)[0].image, dtype=float)


@pytest.mark.parametrize("case", KOHYA, ids=lambda case: case["line"][:20])
def test_lines_are_parsed_as_kohya_parses_them(case: dict[str, Any]) -> None:
    if "guidance_scale" in case["parsed"]:  # options of Flux and Lumina
        with pytest.raises(ValueError, match="--g is embedded guidance, which SDXL has not"):
            parse_line(case["line"])
    else:
        assert parse_line(case["line"]) == case["parsed"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a --ss unknown", "there is no sampler 'unknown'"),
        ("a --w wide", "--w does not take 'wide'"),
        ("a --w 0", "width must lie in 1 to 16384, got 0"),
        ("a --cn pose.png", "--cn is a ControlNet picture"),
        ("a --fs 3", "--fs is a flow shift"),
        ("a --ctr 0.2", "--ctr is"),
        ("a --rcfg 1", "--rcfg is"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_line(line)
    assert message in str(error.value)


def test_what_is_no_option_is_dropped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_line("hill -- quality --W 96") == {"prompt": "hill", "width": 96}
    assert "'-- quality' is no option" in caplog.text


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("# comment\n\n  a red star --d 5\nb --n low\n", encoding="utf-8")
    assert parse_prompts(path) == [Prompt("a red star", seed=5), Prompt("b", negative_prompt="low")]


def test_every_wrong_line_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a --w x\nfine\nb --ss no\n", encoding="utf-8")
    with pytest.raises(ConfigFault) as error:
        parse_prompts(path, sampler="none")
    assert [fault.where for fault in error.value.faults] == [
        f"{path}, line 1",
        f"{path}, line 3",
        "--sample_sampler",
    ]
    for name, content, message in (
        ("empty.txt", "# nothing\n", "holds no prompt"),
        ("prompts.toml", "", "not a text file"),
        ("latin.txt", "é".encode("latin-1"), "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigFault, match=message):
            parse_prompts(tmp_path / name)
    with pytest.raises(ConfigFault, match="cannot be read"):
        parse_prompts(tmp_path / "absent.txt")


def test_the_table_has_the_flags_choices() -> None:
    assert list(SAMPLERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_sampler_draws_with_the_models_schedule(name: str) -> None:
    """All but the ancestral ones come to the same picture in the end."""
    if sampler_fault(name):
        assert "needs the package scipy" in str(sampler_fault(name))
        with pytest.raises(ConfigFault, match="scipy"):
            make_sampler(name, {})
        return
    sampler = make_sampler(name, pipeline().scheduler.config)
    assert sampler.config.prediction_type == "v_prediction" and sampler.config.beta_schedule == "scaled_linear"
    assert not sampler.config.get("clip_sample", False)
    found = drawn(name)
    assert found.shape == (64, 64, 3) and found.std() > 5
    if not name.endswith("_a"):
        assert np.abs(found - drawn("heun")).mean() < 6


def test_pictures_are_those_of_diffusers() -> None:
    """A user draws the same picture from the exported model with the same seed."""
    ours = draw_pictures(pipeline(), [Prompt("a red star", seed=7, sample_steps=4)], sampler="euler", seed=0)[0]
    pipe = pipeline()
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    theirs = pipe("a red star", negative_prompt="", height=64, width=64, num_inference_steps=4, guidance_scale=7.5,
                  generator=generator).images[0]  # fmt: skip
    assert np.abs(np.asarray(ours.image, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1
    assert ours.seed == 7


def test_the_runs_seed_is_the_default_and_repeats() -> None:
    prompts = [Prompt("a", sample_steps=2), Prompt("a", sample_steps=2, seed=9)]
    first = draw_pictures(pipeline(), prompts, sampler="ddim", seed=9)
    assert [p.seed for p in first] == [9, 9]
    assert np.array_equal(np.asarray(first[0].image), np.asarray(first[1].image))


def test_modules_stay_as_they_are(tmp_path: Path) -> None:
    family, parts = loaded(config({"training": {"seed": 1, "mixed_precision": "bf16"}}))
    pipe = family.pipeline(parts)
    parts.root.train()
    parts.root.unet.mid_block.eval()
    modes = [m.training for m in parts.root.modules()]
    before = {name: value.clone() for name, value in parts.root.state_dict().items()}
    scheduler = pipe.scheduler
    with torch.autocast("cpu", torch.bfloat16):
        draw_grid(pipe, [Prompt("a", sample_steps=2)], tmp_path, "N", "000001", sampler="euler_a", seed=1)
    assert [m.training for m in parts.root.modules()] == modes
    after = parts.root.state_dict()
    assert all(after[name].dtype == value.dtype and after[name].equal(value) for name, value in before.items())
    assert next(parts.frozen["vae"].parameters()).dtype == torch.float32
    assert pipe.scheduler is scheduler


def test_files_are_named_as_kohya_names_them(tmp_path: Path) -> None:
    prompts = [Prompt("a", sample_steps=1), Prompt("b", sample_steps=1, width=100, height=33, seed=4)]
    grid = draw_grid(pipeline(), prompts, tmp_path / "sample", "stars", "e000002", sampler="ddim", seed=1)
    names = sorted(path.name for path in (tmp_path / "sample").iterdir())
    assert [re.sub(r"\d{14}", "TIME", name) for name in names] == [
        "stars_e000002_00_TIME_1.png",
        "stars_e000002_01_TIME_4.png",
        "stars_e000002_grid.png",
    ]
    assert grid.name == "stars_e000002_grid.png" and Image.open(grid).size == (192, 64)
    assert Image.open(tmp_path / "sample" / names[1]).size == (96, 32)  # down to multiples of 8


def test_sizes_default_to_the_models_own() -> None:
    assert size_of(pipeline(), Prompt("a")) == (64, 64)
    assert size_of(pipeline(), Prompt("a", width=3, height=79)) == (72, 8)


def test_grids_are_laid_out_row_by_row() -> None:
    images = [Image.new("RGB", (2, 2), (i, 0, 0)) for i in range(5)]
    grid = np.asarray(grid_of(images))[::2, ::2, 0]
    assert grid.tolist() == [[0, 1, 2], [3, 4, 255]]
