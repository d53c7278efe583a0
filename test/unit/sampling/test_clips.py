"""Clips are drawn as pictures are, and written as files that play."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from families import config, loaded
from PIL import Image
from refusals import names

from difftrain.contracts import ConfigFault
from difftrain.data.media.clips import decode_clip, probe_clip
from difftrain.report.samples import sample_images, samples_section
from difftrain.sampling import Prompt, draw_grid, draw_pictures, read_prompts
from difftrain.sampling.clips import DrawnClip, sheet_of
from difftrain.train.drawn_clips import write_beside, write_preview

FAMILY = "wan"


@cache
def model() -> Any:
    tiny = loaded(config(FAMILY))
    return tiny.family.drawer(tiny.parts)


def test_a_prompt_without_frames_is_a_picture_and_others_come_down_to_what_is_taken() -> None:
    assert model().frames_of(None) == 1
    assert [model().frames_of(frames) for frames in (1, 4, 5, 8, 9)] == [1, 1, 5, 5, 9]
    assert model().latent_shape((32, 48), 9)[1] == 3
    assert model().tokens((32, 48), 9) == 3 * model().tokens((32, 48))


def test_a_clip_is_what_its_noise_makes_of_it_by_hand() -> None:
    prompt = Prompt("a red star", width=48, height=32, sample_steps=2, scale=1, seed=3, frame_count=7)
    drawn = draw_pictures(model(), [prompt], sampler="flow_euler", seed=0)[0]
    assert drawn.clip is not None
    assert (drawn.clip.frames.shape, drawn.clip.fps, drawn.size) == ((5, 32, 48, 3), 16, (48, 32))
    noise = torch.randn((1, *model().latent_shape((32, 48), 5)), generator=torch.Generator().manual_seed(3))
    from difftrain.sampling.draw import walk
    from difftrain.sampling.samplers import make_sampler

    with torch.no_grad():
        latents = walk(
            model(),
            model().conditions(["a red star"], (32, 48)),
            None,
            noise,
            sampler=make_sampler("flow_euler", model().scheduler.config, model().tokens((32, 48), 5), mu=model().mu),
            steps=2,
            guidance=1,
        )
        pixels = model().decode(latents)[0]
    np.testing.assert_array_equal(drawn.clip.frames, (pixels.movedim(0, -1) * 255).round().byte())


def test_a_grid_of_clips_has_files_that_play_and_the_page_shows_them(tmp_path: Path) -> None:
    prompts = [Prompt("a", width=48, height=32, sample_steps=1, frame_count=9), Prompt("b", width=32, height=32)]
    for step in ("000000", "000004"):
        grid = draw_grid(
            model(), prompts, tmp_path / "sample", "stars", step, sampler="flow_euler", seed=1, write_clip=write_beside
        )
    suffixes = sorted(path.suffix for path in (tmp_path / "sample").glob("stars_000004_00_*"))
    assert suffixes == [".mp4", ".png", ".webp"]
    assert [path.suffix for path in (tmp_path / "sample").glob("stars_000004_01_*")] == [".png"]
    with Image.open(grid) as image:
        assert image.size == (2 * (5 * 48 + 4 * 2), 32)
    video = next((tmp_path / "sample").glob("*_00_*.mp4"))
    header = probe_clip(video)
    assert (header.size_wh, header.frames, header.fps) == ((48, 32), 9, 16)
    with av.open(str(video)) as container:
        facts = json.loads(container.metadata["comment"])["difftrain"]
    assert (facts["prompt"], facts["frames"], facts["fps"], facts["width"]) == ("a", 9, 16, 48)
    page = samples_section(sample_images(tmp_path))
    assert page.count("data:image/webp") == 2
    assert "9 frames" in page
    video.with_suffix(".webp").write_bytes(b"RIFF")  # hostile, or half written: the sheet is shown
    assert samples_section(sample_images(tmp_path)).count("data:image/webp") == 1


def test_a_large_preview_is_made_smaller_for_a_page(tmp_path: Path) -> None:
    from difftrain.report.samples import _animated

    noise = np.random.default_rng(0).integers(0, 255, (60, 200, 300, 3), np.uint8)
    path = write_preview(tmp_path / "a.webp", DrawnClip(noise, 16))
    with Image.open(path) as image:
        assert image.n_frames == 30
        assert max(image.size) == 256
    address = _animated(path, 0, 0, 120_000)
    assert address is not None
    assert len(address) < 170_000


def test_a_sheet_has_the_first_and_the_last_frame() -> None:
    frames = np.stack([np.full((8, 10, 3), 10 * number, np.uint8) for number in range(17)])
    sheet = np.asarray(sheet_of(frames))
    assert sheet.shape == (8, 5 * 10 + 4 * 2, 3)
    assert [int(sheet[0, 12 * k, 0]) for k in range(5)] == [0, 40, 80, 120, 160]
    assert sheet_of(frames[:2]).size == (22, 8)


def test_frames_of_a_prompt_are_read_and_judged(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat --f 17 --w 64\n")
    assert read_prompts(path, "flow_euler", flow=True, clips=True).prompts[0].frame_count == 17
    file = read_prompts(path, "flow_euler", flow=True)
    assert file.prompts[0].frame_count is None
    assert any("--f" in note for note in file.notes)
    path.write_text("a cat --f 0\n")
    with pytest.raises(ConfigFault) as caught:
        read_prompts(path, "flow_euler", flow=True, clips=True)
    assert names(caught.value.faults[0], "frame_count", 0, 1)


def test_a_clip_decodes_to_what_was_drawn(tmp_path: Path) -> None:
    from fractions import Fraction

    prompt = Prompt("a", width=64, height=64, sample_steps=1, frame_count=5)
    draw_grid(model(), [prompt], tmp_path, "N", "000001", sampler="flow_euler", seed=1, write_clip=write_beside)
    clip = draw_pictures(model(), [prompt], sampler="flow_euler", seed=1)[0].clip
    assert clip is not None
    back = decode_clip(next(tmp_path.glob("*.mp4")), first=0, frames=5, fps=Fraction(16))
    assert np.abs(back.astype(int) - clip.frames).mean() < 12
