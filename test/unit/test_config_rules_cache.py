"""What cached features cannot go with is refused by name, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config import TrainConfig, rules_cache
from difftrain.config.digest import digest
from difftrain.config.parse import parse
from difftrain.contracts import ConfigFault

LATENTS = [
    ("--random_crop", "--random_crop: contradicts --cache_latents: it cuts another part"),
    ("--color_aug", "--color_aug: contradicts --cache_latents: it colours a picture anew"),
    ("--face_crop_aug_range=2.0,4.0", "--face_crop_aug_range: contradicts --cache_latents: it cuts a picture anew"),
]
TEXT = [
    ("--shuffle_caption", "--shuffle_caption: contradicts --cache_text_encoder_outputs"),
    ("--caption_dropout_rate=0.1", "--caption_dropout_rate: contradicts --cache_text_encoder_outputs: it drops"),
    ("--caption_dropout_every_n_epochs=2", "--caption_dropout_every_n_epochs: contradicts --cache_text_encoder_outputs"),
    ("--caption_tag_dropout_rate=0.1", "--caption_tag_dropout_rate: contradicts --cache_text_encoder_outputs"),
    ("--token_warmup_step=10", "--token_warmup_step: contradicts --cache_text_encoder_outputs: it lets captions grow"),
    ("--enable_wildcard", "--enable_wildcard: contradicts --cache_text_encoder_outputs: it makes another caption"),
    ("--weighted_captions", "--weighted_captions: contradicts --cache_text_encoder_outputs: it weighs"),
    ("--train_text_encoder", "--train_text_encoder: contradicts --cache_text_encoder_outputs: the outputs of an encoder"),
]  # fmt: skip
ONLY = [
    ("--cache_only", "--cache_only: builds nothing that outlives it (give --cache_latents_to_disk or"),
    ("--cache_only --cache_latents_to_disk --cache_text_encoder_outputs",
     "--cache_text_encoder_outputs: would be gone at the end of --cache_only (give --cache_text_encoder_outputs_to_disk)"),
]  # fmt: skip


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    flags = ["--init_from_config=tiny", f"--train_data_dir={tmp_path / 'data'}", f"--output_dir={tmp_path / 'out'}"]
    return [*flags, "--resolution=64,64"]


def faults(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parse(argv)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(("more", "said"), LATENTS)
@pytest.mark.parametrize("cache", ["--cache_latents", "--cache_latents_to_disk"])
def test_latents_of_one_cut_go_with_no_augmentation(line: list[str], cache: str, more: str, said: str) -> None:
    (found,) = faults([*line, cache, *more.split()])
    assert found.startswith(said.replace("--cache_latents", cache)) and "give one of them" in found
    parse([*line, cache])
    parse([*line, "--cache_text_encoder_outputs", *more.split()])


@pytest.mark.parametrize(("more", "said"), TEXT)
@pytest.mark.parametrize("cache", ["--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk"])
def test_outputs_of_captions_as_they_stand_go_with_no_drawing(
    line: list[str], cache: str, more: str, said: str
) -> None:
    (found,) = faults([*line, cache, *more.split()])
    assert found.startswith(said.replace("--cache_text_encoder_outputs", cache)) and "give one of them" in found
    parse([*line, cache])
    parse([*line, "--cache_latents", *more.split()])


@pytest.mark.parametrize(("more", "said"), ONLY)
def test_only_what_is_on_disk_outlives_a_run_that_builds(line: list[str], more: str, said: str) -> None:
    (found,) = faults([*line, *more.split()])
    assert found.startswith(said)


def test_all_faults_are_told_at_once(line: list[str]) -> None:
    more = [word for words, _ in (*LATENTS, *TEXT) for word in words.split()]
    found = faults([*line, "--cache_latents", "--cache_text_encoder_outputs", *more])
    assert len(found) == len(LATENTS) + len(TEXT)
    for _, said in (*LATENTS, *TEXT):
        assert any(each.startswith(said) for each in found), said


def test_subsets_of_a_dataset_toml_are_named(line: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("still", "cut")]
    for folder in folders:
        folder.mkdir()
    subsets = f"""
[[datasets]]
resolution = 64
[[datasets.subsets]]
image_dir = "{folders[0]}"
[[datasets.subsets]]
image_dir = "{folders[1]}"
random_crop = true
shuffle_caption = true
"""
    (tmp_path / "data.toml").write_text(subsets)
    argv = [word for word in line if "train_data_dir" not in word and "resolution" not in word]
    argv += [f"--dataset_config={tmp_path / 'data.toml'}", "--cache_latents", "--cache_text_encoder_outputs"]
    found = faults(argv)
    assert len(found) == 2 and all(str(folders[1]) in each and str(folders[0]) not in each for each in found)
    assert any("random_crop contradicts --cache_latents" in each for each in found)
    assert any("shuffle contradicts --cache_text_encoder_outputs" in each for each in found)


def test_an_unread_check_is_said(line: list[str]) -> None:
    notes = parse([*line, "--cache_latents", "--skip_cache_check"]).notes
    assert any(note.startswith("--skip_cache_check: has no effect") for note in notes)
    assert not any(
        "skip_cache_check" in note for note in parse([*line, "--cache_latents_to_disk", "--skip_cache_check"]).notes
    )


def test_a_cache_makes_no_other_run(line: list[str]) -> None:
    """What is read is what would be encoded, so that a run may go on with or without."""
    plain = parse(line).config
    for flags in (["--cache_latents_to_disk", "--cache_text_encoder_outputs"], ["--disable_mmap_load_safetensors"]):
        assert digest(parse([*line, *flags]).config) == digest(plain)


def test_every_field_of_the_rules_exists() -> None:
    cfg = TrainConfig()
    assert all(hasattr(cfg.data, field) for field in rules_cache._PICTURE)
    assert all(hasattr(cfg.captions, field) for field in rules_cache._CAPTION)
