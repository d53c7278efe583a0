"""The demo's clips: every motion is what its caption says, and what is held out is seen in its parts."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from emoji_packages import write_packages

from difftrain.data.media.clips import decode_clip, probe_clip
from difftrain.demo import clips, make, prepare
from difftrain.demo.datasets import DemoPicture
from difftrain.models.vae.fit import closed_form_encoder, hold_frames, synthetic_pictures
from difftrain.models.vae.latents import posterior


def _middles(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return across, down and area of what is darker than the ground, frame by frame."""
    dark = frames.sum(-1) < 300
    down, across = np.mgrid[: frames.shape[1], : frames.shape[2]]
    area = dark.sum((1, 2))
    return (dark * across).sum((1, 2)) / area, (dark * down).sum((1, 2)) / area, area


@pytest.mark.parametrize("motion", clips.MOTIONS, ids=lambda motion: motion.caption.split("camera ")[1])
def test_motions_are_what_their_captions_say(motion: clips.Motion, tmp_path: Path) -> None:
    write_packages(tmp_path)
    black = next(iter(clips.datasets.emoji_pictures(tmp_path)))
    frames = clips.frames_of(clips.EmojiClip(black, "white", motion))
    assert frames.shape == (17, 64, 64, 3)
    across, down, area = (part[-1] - part[0] for part in _middles(frames.astype(int)))
    words = motion.caption.split()[-1]
    # the camera goes one way, and what it sees the other
    assert {"left": across > 9, "right": across < -9, "up": down > 9, "down": down < -9}.get(words, abs(across) < 1)
    assert {"in": area > 500, "out": area < -500}.get(words, abs(area) < 50)


def test_a_caption_names_the_emoji_alone() -> None:
    clip = clips.EmojiClip(DemoPicture(b"", "webp", "red apple, fruit", 1, 1), "white", clips.MOTIONS[1])
    assert clip.caption == f"red apple, {clips.MOTIONS[1].caption}"


def test_the_folder_holds_clips_and_what_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_packages(tmp_path / "cache" / "difftrain" / "npm")
    every = clips.datasets.emoji_pictures
    monkeypatch.setattr(clips.datasets, "emoji_pictures", lambda npm: islice(every(npm), 5))
    home = tmp_path / "demo"
    prepare.make("clips", home, 1.0, lambda _: None, ("data",), "wan")
    train, unseen = home / "pictures" / "train", home / "pictures" / "unseen"
    files = sorted(train.glob("*.mp4"))
    assert len(files) == 5 * len(clips.MOTIONS) - 2
    header = probe_clip(files[0])
    assert (header.size_wh, header.frames, round(header.fps)) == ((64, 64), 17, 16)
    assert decode_clip(files[0], first=0, frames=17, fps=Fraction(16)).shape == (17, 64, 64, 3)
    seen = {file.read_text() for file in train.glob("*.txt")}
    held_out = {file.read_text() for file in unseen.glob("*.txt")}
    assert len(held_out) == 2 and not held_out & seen and len(seen) == len(files)
    assert {caption.partition(",")[0] for caption in held_out} < {caption.partition(",")[0] for caption in seen}
    assert (home / "train.toml").read_text() == make.data_text(train, None, (1, 17))
    assert all(
        line.endswith(" --f 17 --d " + str(n)) for n, line in enumerate((home / "prompts.txt").read_text().splitlines())
    )
    assert clips.some_frames(train).shape == (5 * len(files), 3, 64, 64)


def test_a_vae_that_is_fitted_to_images_sees_every_fourth_frame_and_holds_it() -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1,
                           latents_mean=[0.0] * 4, latents_std=[1.0] * 4).eval()  # fmt: skip
    pictures = synthetic_pictures(9, 32, 1)
    closed_form_encoder(vae, pictures)
    hold_frames(vae)
    clip, _ = posterior(vae, pictures.transpose(0, 1)[None], fp32=True, batch_size=None)
    alone, _ = posterior(vae, pictures[::4], fp32=True, batch_size=None)
    torch.testing.assert_close(clip[0].transpose(0, 1), alone[:, :, 0])
    with torch.no_grad():
        frames = vae.decode(clip).sample[0].transpose(0, 1)
        first = vae.decode(alone[:1]).sample[0].transpose(0, 1)
    torch.testing.assert_close(frames[0], first[0])
    for start in (1, 5):
        torch.testing.assert_close(frames[start : start + 4], frames[start].expand(4, -1, -1, -1))
    assert float((frames[1] - frames[5]).abs().max()) > 1e-3
