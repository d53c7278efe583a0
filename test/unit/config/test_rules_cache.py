"""What cached features cannot go with is refused by name, all of it at once."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from refusals import is_about

from difftrain.config import TrainConfig, toml
from difftrain.config.digest import digest
from difftrain.config.parse_flags import parse
from difftrain.config.rules import data as rules_cache
from difftrain.config.schema import names
from difftrain.config.schema.section import CacheDtype
from difftrain.contracts import ConfigFault
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.registry import FAMILIES
from difftrain.models.text.encode import outputs_of

LATENTS = [
    ("--random_crop", "--random_crop"),
    ("--color_aug", "--color_aug"),
    ("--face_crop_aug_range=2.0,4.0", "--face_crop_aug_range"),
]
TEXT = [
    ("--token_warmup_step=10", "--token_warmup_step"),
    ("--train_text_encoder", "--train_text_encoder"),
]
DRAWN = ["--shuffle_caption", "--enable_wildcard", "--caption_tag_dropout_rate=0.1"]
DROPPED = ["--caption_dropout_rate=0.1", "--caption_dropout_every_n_epochs=2", "--weighted_captions"]
DISK = "--cache_latents_to_disk"
REFUSED = [
    ("--cache_latents_as=sample", ["--cache_latents_as", "sample", "--cache_latents"]),
    ("--trust_cache", ["--trust_cache", "--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"]),
    ("--trust_cache --cache_latents", ["--trust_cache", "--cache_latents_to_disk"]),
    ("--regenerate_cache", ["--regenerate_cache", "--cache_latents_to_disk"]),
    ("--cache_preload --cache_latents", ["--cache_preload", "--cache_latents_to_disk"]),
    (f"{DISK} --trust_cache --regenerate_cache", ["--regenerate_cache", "contradicts --trust_cache"]),
    (f"{DISK} --trust_cache --verify_data=full", ["--verify_data", "contradicts --trust_cache"]),
    (f"{DISK} --cache_dir={__file__}", ["--cache_dir", f"{__file__!r}", "folder"]),
    (f"{DISK} --cache_copy_gib=1", ["--cache_copy_gib", "--cache_dir=URL"]),
    (f"{DISK} --cache_copy_gib=0 --cache_dir=memory://b/c", ["--cache_copy_gib", "above 0", "got 0"]),
    (f"{DISK} --cache_dir=memory://b/c --cache_only", ["--cache_only", "contradicts --cache_dir"]),
    (f"{DISK} --cache_dir=memory://b/c --regenerate_cache", ["--regenerate_cache", "contradicts --cache_dir"]),
    ("--cache_dir=memory://b/c --cache_latents", ["--cache_dir", "URL", "--cache_latents_to_disk"]),
    ("--cache_shuffle_num=0", ["--cache_shuffle_num", "1", "got 0"]),
    ("--cache_batch_size=0", ["--cache_batch_size", "1", "got 0"]),
    ("--cache_workers=-1", ["--cache_workers", "0", "got -1"]),
    ("--cache_segment_gib=0", ["--cache_segment_gib", "above 0", "got 0"]),
    ("--cache_segment_gib=nan", ["--cache_segment_gib", "nan"]),
    ("--cache_latents_as=median", ["--cache_latents_as", "moments, mean, sample", "'median'"]),
    ("--cache_latents_dtype=int8", ["--cache_latents_dtype", "fp32, bf16, fp16, fp8", "'int8'"]),
    ("--cache_text_dtype=float16", ["--cache_text_dtype", "auto, fp32, bf16, fp16, fp8", "'float16'"]),
    ("--cache_dtypes=hidden_3=fp8", ["--cache_dtypes", "'hidden_3'", "hidden_2"]),
    ("--cache_dtypes=latents=fp8", ["--cache_dtypes", "'latents'", "moments, hidden_1"]),
    (f"{DISK} --cache_latents_as=mean --cache_dtypes=moments=fp8", ["--cache_dtypes", "'moments'", "latents, hidden_1"]),
    ("--cache_dtypes=pooled=fp7", ["--cache_dtypes", "pooled", "fp32, bf16, fp16, fp8", "'fp7'"]),
    ("--cache_dtypes=pooled", ["--cache_dtypes", "NAME=VALUE", "'pooled'"]),
    ("--cache_dtypes pooled=fp8 pooled=fp16", ["--cache_dtypes", "pooled", "fp8", "fp16"]),
]  # fmt: skip
IDLE = [
    "--cache_latents_dtype=bf16", "--cache_text_dtype=bf16", "--cache_dtypes=pooled=fp8", "--cache_batch_size=8",
    "--cache_workers=2", "--cache_segment_gib=0.5", "--skip_cache_check", "--cache_shuffle_num=3",
]  # fmt: skip
ONLY = [
    ("--cache_only", ["--cache_only", "--cache_latents_to_disk"]),
    ("--cache_only --cache_latents_to_disk --cache_text_encoder_outputs",
     ["--cache_text_encoder_outputs", "--cache_only", "--cache_text_encoder_outputs_to_disk"]),
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


@pytest.mark.parametrize(("more", "where"), LATENTS)
@pytest.mark.parametrize("cache", ["--cache_latents", "--cache_latents_to_disk"])
def test_latents_of_one_cut_go_with_no_augmentation(line: list[str], cache: str, more: str, where: str) -> None:
    (found,) = faults([*line, cache, *more.split()])
    assert is_about(found, where, f"contradicts {cache}")
    parse([*line, cache])
    parse([*line, "--cache_text_encoder_outputs", *more.split()])


@pytest.mark.parametrize(("more", "where"), TEXT)
@pytest.mark.parametrize("cache", ["--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk"])
def test_outputs_of_captions_that_grow_are_not_known_before(line: list[str], cache: str, more: str, where: str) -> None:
    (found,) = faults([*line, cache, *more.split()])
    assert is_about(found, where, f"contradicts {cache}")
    parse([*line, cache])
    parse([*line, "--cache_latents", *more.split()])


@pytest.mark.parametrize(("more", "facts"), ONLY)
def test_only_what_is_on_disk_outlives_a_run_that_builds(line: list[str], more: str, facts: list[str]) -> None:
    (found,) = faults([*line, *more.split()])
    assert is_about(found, *facts)


def test_all_faults_are_told_at_once(line: list[str]) -> None:
    more = [word for words, _ in (*LATENTS, *TEXT) for word in words.split()]
    found = faults([*line, "--cache_latents", "--cache_text_encoder_outputs", *more])
    assert len(found) == len(LATENTS) + len(TEXT)
    for table, cache in ((LATENTS, "--cache_latents"), (TEXT, "--cache_text_encoder_outputs")):
        for _, where in table:
            assert any(is_about(each, where, f"contradicts {cache}") for each in found), where


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
token_warmup_step = 3
"""
    (tmp_path / "data.toml").write_text(subsets)
    argv = [word for word in line if "train_data_dir" not in word and "resolution" not in word]
    argv += [f"--dataset_config={tmp_path / 'data.toml'}", "--cache_latents", "--cache_text_encoder_outputs"]
    found = faults(argv)
    assert len(found) == 2 and all(str(folders[1]) in each and str(folders[0]) not in each for each in found)
    assert any("random_crop contradicts --cache_latents" in each for each in found)
    assert any("token_warmup_step contradicts --cache_text_encoder_outputs" in each for each in found)


@pytest.mark.flags("cache_shuffle_num")
@pytest.mark.parametrize("cache", ["--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk"])
def test_captions_that_are_drawn_are_cached_in_a_number_of_variants(line: list[str], cache: str) -> None:
    for more in DRAWN:
        found = parse([*line, cache, more])
        assert found.config.cache.shuffle_num == 10
        assert sum(is_about(note, "--cache_shuffle_num", "10") for note in found.notes) == 1
        chosen = parse([*line, cache, more, "--cache_shuffle_num=3"])
        assert chosen.config.cache.shuffle_num == 3 and not any("shuffle_num" in note for note in chosen.notes)
        assert parse([*line, more]).config.cache.shuffle_num is None  # online each use draws its own
    for more in DROPPED:
        assert parse([*line, cache, more]).config.cache.shuffle_num is None


def test_a_run_s_own_record_gives_the_same_number_of_variants(line: list[str], tmp_path: Path) -> None:
    first = parse([*line, "--cache_text_encoder_outputs", "--shuffle_caption"]).config
    (tmp_path / "config.toml").write_text(toml.dump(first), encoding="utf-8")
    assert parse([f"--config={tmp_path / 'config.toml'}"]).config == first


@pytest.mark.parametrize(("more", "facts"), REFUSED)
def test_what_contradicts_itself_is_named(line: list[str], more: str, facts: list[str]) -> None:
    (found,) = faults([*line, *more.split()])
    assert is_about(found, *facts)


@pytest.mark.parametrize("flag", IDLE)
def test_what_has_no_effect_is_said(line: list[str], flag: str) -> None:
    name, full = flag.partition("=")[0], [DISK, "--cache_text_encoder_outputs_to_disk", "--shuffle_caption"]
    (note,) = parse([*line, flag]).notes
    assert is_about(note, name, "no effect")
    assert not any(is_about(note, name, "no effect") for note in parse([*line, *full, flag]).notes)


def test_nothing_is_kept_in_memory_for_a_build_alone(line: list[str]) -> None:
    (note,) = parse([*line, DISK, "--cache_only", "--cache_preload"]).notes
    assert is_about(note, "--cache_preload", "--cache_only")


@pytest.mark.flags("cache_dtypes")
def test_dtypes_of_features_come_from_words_commas_or_a_table(line: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[cache]\nlatents = true\ntext = true\ndtypes = {moments = 'fp16', hidden_2 = 'fp8'}\n")
    wanted = {"moments": "fp16", "hidden_2": "fp8"}
    for words in (["moments=fp16", "hidden_2=fp8"], ["moments=fp16,hidden_2=fp8"]):
        flags = ["--cache_latents", "--cache_text_encoder_outputs", "--cache_dtypes", *words]
        assert parse([*line, *flags]).config.cache.dtypes == wanted
    found = parse([*line, f"--config={recipe}"]).config
    assert found.cache.dtypes == wanted
    (tmp_path / "config.toml").write_text(toml.dump(found), encoding="utf-8")
    assert toml.load(tmp_path / "config.toml") == found


@pytest.mark.flags("cache_preload", "cache_segment_gib", "cache_copy_gib", "cache_workers", "cache_batch_size")
@pytest.mark.flags("trust_cache", "regenerate_cache", "cache_latents_as", "cache_latents_dtype", "cache_text_dtype")
def test_the_table_of_a_recipe_and_the_flags_say_the_same(line: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[cache]\nlatents_to_disk = true\ntext_to_disk = true\nlatents_as = 'mean'\nlatents_dtype = 'bf16'\n"
        "text_dtype = 'fp8'\npreload = true\nsegment_gib = 2\ncopy_gib = 5.5\nworkers = 3\nbatch_size = 7\n"
        "trust = true\n[data]\ncache_dir = 'memory://bucket/cache'\n"
    )
    flags = [
        "--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk", "--cache_latents_as=mean",
        "--cache_latents_dtype=bf16", "--cache_text_dtype=fp8", "--cache_preload", "--cache_segment_gib=2",
        "--cache_copy_gib=5.5", "--cache_workers=3", "--cache_batch_size=7", "--trust_cache",
        "--cache_dir=memory://bucket/cache",
    ]  # fmt: skip
    typed, written = parse([*line, *flags]).config, parse([*line, f"--config={recipe}"]).config
    assert typed == written and typed.cache.segment_gib == 2 and typed.cache.copy_gib == 5.5
    assert parse([*line, DISK, "--regenerate_cache"]).config.cache.regenerate


def test_a_cache_makes_no_other_run(line: list[str]) -> None:
    """What is read is what would be encoded, so that a run may go on with or without."""
    plain = parse(line).config
    for flags in (["--cache_latents_to_disk", "--cache_text_encoder_outputs"], ["--disable_mmap_load_safetensors"]):
        assert digest(parse([*line, *flags]).config) == digest(plain)


def test_online_a_number_of_captions_makes_the_run_that_a_cache_of_them_is(line: list[str]) -> None:
    cached = parse([*line, "--shuffle_caption", "--cache_text_encoder_outputs"]).config
    assert digest(parse([*line, "--shuffle_caption", "--cache_shuffle_num=10"]).config) == digest(cached)
    assert digest(parse([*line, "--shuffle_caption"]).config) != digest(cached)


def test_every_field_of_the_rules_exists() -> None:
    cfg = TrainConfig()
    assert all(hasattr(cfg.data, field) for field in rules_cache._PICTURE)
    assert all(hasattr(cfg.captions, field) for field in rules_cache._CAPTION)


def test_the_names_of_features_and_dtypes_are_those_of_the_other_rooms() -> None:
    assert get_args(CacheDtype) == names.CACHE_DTYPES
    outputs = {
        family.name: {text.part: outputs_of(family.texts, place) for place, text in enumerate(family.texts, 1)}
        for family in (SD3Family(TrainConfig()), SDXLFamily(TrainConfig()))
    }
    made = {family: tuple(name for names in told.values() for name in names) for family, told in outputs.items()}
    assert made == {family: FAMILIES[family].text_features for family in made}
