"""JSON schemas of the files beside a run's own: kohya's TOML of arguments, and both data set TOMLs, from their tables."""

from __future__ import annotations

from typing import Any

from difftrain.config.arguments_file import ITS_OWN
from difftrain.config.datasets import keys as datasets
from difftrain.config.datasets.keys import DIFFUSION_PIPE, KOHYA, DatasetKey
from difftrain.config.schema.sections import CaptionSection, DatasetSection, SubsetSection, TrainConfig
from difftrain.config.schema.validate import choices_of, description_of
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.row import Row
from difftrain.config.spellings.spelling import meaning, spelled
from difftrain.models.registry import FAMILIES

_SECTIONS = {"dataset": DatasetSection, "subset": SubsetSection, "captions": CaptionSection}


# ------------------------------------------------------------------ kohya's TOML of arguments


def schema_of_arguments() -> dict[str, Any]:
    """Return the schema of what --config_file takes: names of flags, at the top or in tables of any name."""
    flags = {name: _of_flag(row) for name, row in FLAGS.items() if name not in ITS_OWN}
    return {
        "title": "kohya's TOML of arguments",
        "type": "object",
        "properties": flags,
        "additionalProperties": {
            "description": "tables only group flags: their names mean nothing",
            "type": "object",
            "properties": flags,
            "additionalProperties": False,
        },
    }


def _of_flag(row: Row) -> dict[str, Any]:
    """Return a flag's schema: what stands in quotes there is read as on a command line."""
    word = {"type": ["string", "number"]}
    made: dict[str, Any] = {"type": ["string", "number"]}
    if row.kind == "switch":
        made = {"type": "boolean"}
    elif row.takes_many:
        made = {"anyOf": [word, {"type": "array", "items": word}]}
    elif row.kind == "str":
        choices = [choice for choice in choices_of(row.to) if isinstance(choice, str)] if "." in row.to else []
        made = {"type": "string"} | ({"anyOf": [{"enum": choices}, {}]} if choices else {})
    made["description"] = meaning(row, "kohya")
    return made | ({"deprecated": True} if row.status == "refused" else {})


# ------------------------------------------------------------------ data sets

_SIDE = {"type": "integer", "minimum": 1, "maximum": datasets.MOST_SIDE}
_RATIO = {"type": "number", "minimum": datasets.LEAST_RATIO, "maximum": datasets.MOST_RATIO}
_PAIR = {"type": "array", "items": _SIDE, "minItems": 2, "maxItems": 2}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT = {"type": "string", "minLength": 1}
# a kind of values, as datasets/keys.py judges it -> its schema
KINDS: dict[Any, dict[str, Any]] = {
    datasets.BOOL: {"type": "boolean"},
    datasets.TEXT: {"type": "string"},
    datasets.FILLED: {"type": "string", "minLength": 1},
    datasets.PATHS: {"anyOf": [_TEXT, _list(_TEXT)]},
    datasets.NUMBER: {"type": "number"},
    datasets.COUNT: {"type": "integer", "minimum": 0},
    datasets.POSITIVE: {"type": "integer", "minimum": 1},
    datasets.RATE: {"type": "number", "exclusiveMinimum": 0},
    datasets.SHARE: {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    datasets.REPEATS: {"type": "number", "minimum": datasets.LEAST_REPEATS},
    datasets.RATIO: _RATIO,
    datasets.SIDES: _list({"anyOf": [_SIDE, _PAIR]}),
    datasets.RATIOS: _list({"anyOf": [_RATIO, _PAIR]}),
    datasets.SIZES: _list({**_PAIR, "minItems": 3, "maxItems": 3}),
    datasets.FRAMES: _list({"type": "integer", "minimum": 1}),
    datasets.CLIP_MODE: {"enum": list(datasets.CLIP_MODES)},
}


def schema_of_directories() -> dict[str, Any]:
    """Return the schema of diffusion-pipe's data set TOML: keys above all directories, and [[directory]]."""
    directory = {
        "type": "object",
        "properties": _keys_of(DIFFUSION_PIPE, "[[directory]]"),
        "anyOf": [{"required": ["path"]}, {"required": ["root"]}],
        "additionalProperties": False,
    }
    about = "One folder of images each."
    own = {name: {"description": about, **_list(directory)} for name in ("directory", "datasets")}
    return {
        "title": "dataset TOML of train.py",
        "type": "object",
        "properties": _keys_of(DIFFUSION_PIPE, "") | own,
        "anyOf": [{"required": ["directory"]}, {"required": ["datasets"]}],
        "additionalProperties": False,
    }


def schema_of_subsets() -> dict[str, Any]:
    """Return the schema of kohya's data set TOML: [general], [[datasets]] and [[datasets.subsets]]."""
    subset = {
        "type": "object",
        "properties": _keys_of(KOHYA, "[[datasets.subsets]]"),
        "anyOf": [{"required": ["image_dir"]}, {"required": ["metadata_file"]}],
        "additionalProperties": False,
    }
    own = {"subsets": {"description": "One folder or metadata file each.", **_list(subset)}}
    dataset = {
        "type": "object",
        "properties": _keys_of(KOHYA, "[[datasets]]") | own,
        "required": ["subsets"],
        "additionalProperties": False,
    }
    general = {"type": "object", "properties": _keys_of(KOHYA, "[general]"), "additionalProperties": False}
    return {
        "title": "kohya's dataset TOML",
        "type": "object",
        "properties": {
            "general": {"description": "What holds for all datasets that do not say it themselves.", **general},
            "datasets": {"description": "Data sets: each has sizes and a batch of its own.", **_list(dataset)},
        },
        "required": ["datasets"],
        "additionalProperties": False,
    }


def _keys_of(table: dict[str, DatasetKey], level: str) -> dict[str, Any]:
    return {name: _of_key(key) for name, key in table.items() if level in key.tables}


def _of_key(key: DatasetKey) -> dict[str, Any]:
    spelling = key.spells and DIFFUSION_PIPE[key.spells]
    made = dict(KINDS[key.kind]) if key.kind else _of_field(key)
    if spelling:
        made["description"] = f"The same as {spelling.name}."
    else:
        made["description"] = spelled(key.help or description_of(key.run), door="kohya")
    if key.status == "refused" and key.passes:
        made["enum"] = list(dict.fromkeys(key.passes))
    waits = key.status == "later" and not any(getattr(row, key.needs) for row in FAMILIES.values())
    return made | ({"deprecated": True} if waits or key.status in ("refused", "nearest") else {})


def _of_field(key: DatasetKey) -> dict[str, Any]:
    """Return the schema of the field that a key sets; one number of a resolution is a square."""
    section, _, name = key.to.partition(".")
    fields = (_SECTIONS.get(section) or TrainConfig.model_fields[section].annotation).model_json_schema()  # type: ignore[union-attr]
    made = {word: value for word, value in fields["properties"][name].items() if word not in ("default", "title")}
    choices = made.pop("anyOf", None) or [{word: made.pop(word) for word in list(made) if word != "description"}]
    choices = [choice for choice in choices if choice.get("type") != "null"]
    choices += [{"type": "integer"}] if key.name == "resolution" else []
    return choices[0] if len(choices) == 1 else {"anyOf": choices}
