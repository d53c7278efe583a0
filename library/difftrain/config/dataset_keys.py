"""The keys of kohya's data set TOML: where each may stand, what it sets here, and what a value must be."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from difftrain.config.flags import FLAGS
from difftrain.config.names import did_you_mean
from difftrain.config.sections import CaptionSection, DatasetSection, Section, SubsetSection, ValidationSection
from difftrain.config.unfit import unfit
from difftrain.config.validate import show, wrong_in

Kind = Literal["dreambooth", "finetune", "controlnet"]
Level = Literal["dataset", "subset", "own"]  # the innermost table it may stand in; "own": that one only
ALL: tuple[Kind, ...] = ("dreambooth", "finetune", "controlnet")


class Key(NamedTuple):
    """One key. field "": it sets nothing. kinds: the subsets in which it means something."""

    level: Level
    section: type[Section]
    field: str
    kinds: tuple[Kind, ...] = ALL


def _keys(level: Level, section: type[Section], **fields: str) -> dict[str, Key]:
    return {name: Key(level, section, field) for name, field in fields.items()}


KEYS: dict[str, Key] = {
    **{name: Key("dataset", DatasetSection, name) for name in (
        "batch_size", "resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps",
        "bucket_no_upscale", "validation_split",
    )},
    **_keys("dataset", ValidationSection, validation_seed="seed"),
    "network_multiplier": Key("dataset", Section, ""),
    **_keys("subset", SubsetSection, color_aug="color_aug", face_crop_aug_range="face_crop_range", flip_aug="flip",
            num_repeats="repeats", random_crop="random_crop", resize_interpolation="resize_interpolation",
            custom_attributes="custom_attributes"),
    **_keys("subset", CaptionSection, shuffle_caption="shuffle", keep_tokens="keep_tokens",
            keep_tokens_separator="keep_tokens_separator", secondary_separator="secondary_separator",
            caption_separator="separator", enable_wildcard="enable_wildcard", token_warmup_min="token_warmup_min",
            token_warmup_step="token_warmup_step", caption_prefix="prefix", caption_suffix="suffix",
            caption_dropout_every_n_epochs="dropout_every_n_epochs", caption_dropout_rate="dropout_rate",
            caption_tag_dropout_rate="tag_dropout_rate"),
    "caption_extension": Key("subset", CaptionSection, "extension", ("dreambooth", "controlnet")),
    "class_tokens": Key("subset", SubsetSection, "class_tokens", ("dreambooth",)),
    "cache_info": Key("subset", Section, "", ("dreambooth", "controlnet")),
    "image_dir": Key("own", SubsetSection, "image_dir"),
    "is_reg": Key("own", SubsetSection, "is_reg", ("dreambooth",)),
    "alpha_mask": Key("own", SubsetSection, "alpha_mask", ("dreambooth", "finetune")),
    "metadata_file": Key("own", SubsetSection, "metadata_file", ("finetune",)),
    "conditioning_data_dir": Key("own", SubsetSection, "conditioning_dir", ("controlnet",)),
}  # fmt: skip
RENAMED = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats", "train_data_dir": "image_dir",
           "in_json": "metadata_file", "reg_data_dir": "image_dir, with is_reg = true"}  # fmt: skip
SHAPES = {"resolution": "a number for a square, or [width, height]", "face_crop_aug_range": "[low, high]"}
TABLES: dict[str, tuple[Level, ...]] = {  # what may stand where
    "[general]": ("dataset", "subset"),
    "[[datasets]]": ("dataset", "subset"),
    "[[datasets.subsets]]": ("subset", "own"),
}


def kind_of(subset: dict[str, Any]) -> Kind:
    """Tell what a subset is by the key that only its kind has, as kohya does."""
    if "metadata_file" in subset:
        return "finetune"
    return "controlnet" if "conditioning_data_dir" in subset else "dreambooth"


def misplaced(name: str, table: str) -> tuple[str, str] | None:
    """Say why a key must not stand in a table, and what would be right; None where it may."""
    key = KEYS.get(name)
    if key is None:
        known = [other for other, each in KEYS.items() if each.level in TABLES[table]]
        if name not in RENAMED and name in FLAGS:
            return "no such key", f"give it on the command line: {FLAGS[name].option}"
        meant = f"did you mean {RENAMED[name]}?" if name in RENAMED else did_you_mean(name, known)
        return "no such key", meant or f"known here are {', '.join(known)}"
    if key.level in TABLES[table]:
        return None
    return "has no place here", "put it into [[datasets.subsets]]" if key.level == "own" else "put it into [[datasets]]"


def wrong(name: str, value: Any) -> tuple[str, str] | None:
    """Say what is wrong with the value of a known key, and what would be right; None where it is right."""
    key = KEYS[name]
    if what := unfit(value):
        return what, ""
    if name == "network_multiplier":
        return _multiplier(value)
    if name == "cache_info":
        return None if isinstance(value, bool) else (f"must be true or false, got {show(value)}", "")
    if name == "num_repeats" and value == 0 and isinstance(value, int) and not isinstance(value, bool):
        return None  # kohya's way to leave a subset out
    if value == "" and key.field in ("separator", "image_dir", "metadata_file", "conditioning_dir", "extension"):
        return "must not be empty", ""
    try:
        key.section.model_validate_json(json.dumps({key.field: settled(name, value)}), strict=True)
    except ValidationError as error:
        what, remedy = wrong_in(key.section, error.errors(include_url=False)[0])
        return what, remedy or SHAPES.get(name, "")
    return None


def settled(name: str, value: Any) -> Any:
    """Return a value as its field has it: one number of a resolution is a square, an empty text is none."""
    if name == "resolution" and isinstance(value, int) and not isinstance(value, bool):
        return [value, value]
    return None if value == "" and name != "caption_separator" else value


def _multiplier(value: Any) -> tuple[str, str] | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"must be a number, got {show(value)}", ""
    if value == 1:
        return None
    return (
        f"is {show(value)}: it scales adapters, and what is trained here are the full weights",
        "leave it out, or 1.0",
    )
