"""Every option of captions and samples at once, through the door: it runs, it is drawn alike, and a resume is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doors import Door, losses
from PIL import Image
from safetensors.torch import load_file

OPTIONS = (
    "--shuffle_caption",
    "--keep_tokens_separator=|||",
    "--secondary_separator=;;;",
    "--enable_wildcard",
    "--caption_prefix=photo,",
    "--caption_suffix=, 4k",
    "--token_warmup_min=1",
    "--token_warmup_step=0.75",
    "--caption_dropout_rate=0.1",
    "--caption_tag_dropout_rate=0.2",
    "--weighted_captions",
    "--clip_skip=1",
    "--max_token_length=150",
    "--train_text_encoder",
    "--flip_aug",
    "--random_crop",
    "--color_aug",
    "--alpha_mask",
    "--seed=3",
)
CAPTIONS = [
    "a {red|(green:1.3)} star ||| large;;;round, [small], soft light",
    "first line, of (two)\nsecond line, {a|b|c}",
    r"plain \(not weighted\), tags, more",
]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Door:
    """A door over pictures with alpha and captions that need every option."""
    folder = tmp_path_factory.mktemp("tagged")
    for i in range(9):
        rng = np.random.Generator(np.random.Philox(i))
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 4), dtype=np.uint8), "RGBA")
        coarse.resize([(64, 64), (96, 48), (80, 80)][i % 3], Image.Resampling.BICUBIC).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(CAPTIONS[i // 3])
    return Door(folder, tmp_path_factory.mktemp("cache"))


@pytest.mark.flags(
    "shuffle_caption", "keep_tokens_separator", "secondary_separator", "enable_wildcard", "caption_prefix",
    "caption_suffix", "token_warmup_min", "token_warmup_step", "weighted_captions", "clip_skip", "color_aug",
    "alpha_mask", "random_crop", "flip_aug", "max_token_length",
)  # fmt: skip
def test_with_every_option_a_resume_is_bit_exact(tagged: Door, tmp_path: Path) -> None:
    output = tagged.run(tagged.flags(tmp_path / "a", *OPTIONS, "--max_data_loader_n_workers=0", steps=8))
    assert "clip_skip 1:" in output
    state = tmp_path / "a" / "NAME-step00000004-state"
    tagged.run(tagged.flags(tmp_path / "b", *OPTIONS, "--max_data_loader_n_workers=2", f"--resume={state}", steps=8))
    whole, resumed = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert len(whole) == 8 and whole[-len(resumed) :] == resumed and len(resumed) == 4
    left, right = (load_file(tmp_path / name / "NAME.safetensors") for name in ("a", "b"))
    assert left.keys() == right.keys() and all(value.equal(right[key]) for key, value in left.items())


@pytest.mark.flags("masked_loss", "conditioning_data_dir", "face_crop_aug_range")
def test_contradictions_are_named_together(tagged: Door, tmp_path: Path) -> None:
    flags = (
        f"--conditioning_data_dir={tmp_path / 'none'}",
        "--masked_loss",
        "--face_crop_aug_range=4,1",
        "--caption_tag_dropout_rate=1.5",
        "--token_warmup_step=-1",
        "--clip_skip=-1",
    )
    output = tagged.run(tagged.flags(tmp_path / "a", *flags), expect=2)
    for said in (
        "--conditioning_data_dir: no such",
        "--face_crop_aug_range: must be LOW,HIGH, got 4,1",
        "--caption_tag_dropout_rate: ",
        "--token_warmup_step: ",
        "--clip_skip: ",
    ):
        assert said in output, output
