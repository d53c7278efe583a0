"""Rules of crops, masks and captions: of the flags, and of every subset of a data set TOML."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.config.parse_flags import Parsed, parse
from difftrain.contracts import ConfigFault, Fault


def run(tmp_path: Path, *more: str, toml: str | None = None) -> Parsed:
    for name in ("data", "masks"):
        (tmp_path / name).mkdir(exist_ok=True)
    source = f"--train_data_dir={tmp_path / 'data'}"
    if toml is not None:
        (tmp_path / "d.toml").write_text(toml.replace("HERE", str(tmp_path)))
        source = f"--dataset_config={tmp_path / 'd.toml'}"
    given = [source, "--init_from_config=tiny", f"--output_dir={tmp_path / 'out'}", "--resolution=64,64"]
    return parse([*given, *(word.replace("HERE", str(tmp_path)) for word in more)])


def faults(tmp_path: Path, *more: str, toml: str | None = None) -> list[Fault]:
    with pytest.raises(ConfigFault) as caught:
        run(tmp_path, *more, toml=toml)
    return caught.value.faults


def test_faults_of_flags(tmp_path: Path) -> None:
    said = faults(tmp_path, "--masked_loss", "--conditioning_data_dir=HERE/none", "--face_crop_aug_range=4,1")
    for facts in (
        ("--conditioning_data_dir", "folder", f"'{tmp_path / 'none'}'"),
        ("--face_crop_aug_range", "LOW,HIGH", "4,1", "1.0,4.0"),
    ):
        assert any(is_about(fault, *facts) for fault in said), (facts, said)
    for bad in ("1", "1,2,3", "a,b", "0,1"):
        (fault,) = faults(tmp_path, f"--face_crop_aug_range={bad}")
        assert fault.where == "--face_crop_aug_range"


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ("--masked_loss", "--masked_loss --conditioning_data_dir --alpha_mask"),
        ("--token_warmup_min=3", "--token_warmup_min token_warmup_step"),
        ("--enable_bucket --min_bucket_reso=32 --face_crop_aug_range=1,2", "--face_crop_aug_range enable_bucket"),
        ("--masked_loss --conditioning_data_dir=HERE/masks --alpha_mask", "--alpha_mask mask"),
    ],
)
def test_what_kohya_lets_pass_is_said(tmp_path: Path, more: str, facts: str) -> None:
    assert any(is_about(each, *facts.split()) for each in run(tmp_path, *more.split()).notes)


@pytest.mark.parametrize(
    "more",
    [
        "--alpha_mask",
        "--alpha_mask --masked_loss",
        "--masked_loss --conditioning_data_dir=HERE/masks",
        "--face_crop_aug_range=1.0,4.0 --random_crop",
        "--token_warmup_min=3 --token_warmup_step=0.5",
        "--keep_tokens_separator= --secondary_separator= --caption_prefix= --caption_suffix=",
    ],
)
def test_sound_combinations_pass_without_a_word(tmp_path: Path, more: str) -> None:
    assert not run(tmp_path, *more.split()).notes


def test_values_reach_their_fields(tmp_path: Path) -> None:
    cfg = run(tmp_path, "--face_crop_aug_range=1.0,4.0", "--token_warmup_step=0.25", "--caption_prefix=a b").config
    assert cfg.data.face_crop_range == (1.0, 4.0)
    assert cfg.captions.token_warmup_step == 0.25 and cfg.captions.prefix == "a b"
    assert run(tmp_path, "--caption_prefix=").config.captions.prefix is None


SUBSETS = """
[[datasets]]
resolution = 64
enable_bucket = BUCKETS
min_bucket_reso = 32
[[datasets.subsets]]
image_dir = "HERE/data"
LINES
"""


def test_subsets_are_judged_one_by_one(tmp_path: Path) -> None:
    faces = SUBSETS.replace("BUCKETS", "false").replace("LINES", "face_crop_aug_range = [4.0, 1.0]")
    (fault,) = faults(tmp_path, toml=faces)
    assert is_about(fault, "--dataset_config", tmp_path / "data", "face_crop_range", "LOW,HIGH", "4,1")
    bucketed = SUBSETS.replace("BUCKETS", "true").replace("LINES", "face_crop_aug_range = [1.0, 4.0]")
    notes = [each for each in run(tmp_path, toml=bucketed).notes if "face_crop_range" in each]
    assert len(notes) == 1 and names(notes[0], tmp_path / "data", "enable_bucket")
    masks = SUBSETS.replace("BUCKETS", "false").replace("LINES", 'conditioning_data_dir = "HERE/masks"')
    (fault,) = faults(tmp_path, toml=masks)
    assert is_about(fault, "--dataset_config", "conditioning_dir", "--masked_loss")
    assert not any("mask" in each for each in run(tmp_path, "--masked_loss", toml=masks).notes)
    alpha = SUBSETS.replace("BUCKETS", "false").replace("LINES", "alpha_mask = true")
    assert not any("mask" in each for each in run(tmp_path, "--masked_loss", toml=alpha).notes)
