"""kohya's data set TOML: its keys, and how a file becomes data sets."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from difftrain.config import hub_ids
from difftrain.config.paths import expanded, is_file, is_folder
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import (
    CaptionSection,
    DatasetSection,
    PictureSection,
    Section,
    SizeSection,
    SubsetSection,
    TrainConfig,
    ValidationSection,
)
from difftrain.config.schema.validate import show, unsupported_value, wrong_in
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.spelling import option
from difftrain.contracts.errors import Fault

Kind = Literal["dreambooth", "finetune", "controlnet"]
Level = Literal["dataset", "subset", "own"]  # the innermost table it may stand in; "own": that one only
ALL: tuple[Kind, ...] = ("dreambooth", "finetune", "controlnet")


class DatasetKey(NamedTuple):
    """One key. field "": it sets nothing. kinds: the subsets in which it means something."""

    level: Level
    section: type[Section]
    field: str
    kinds: tuple[Kind, ...] = ALL


def _keys(level: Level, section: type[Section], **fields: str) -> dict[str, DatasetKey]:
    return {name: DatasetKey(level, section, field) for name, field in fields.items()}


KEYS: dict[str, DatasetKey] = {
    **{name: DatasetKey("dataset", DatasetSection, name) for name in (
        "batch_size", "resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps",
        "bucket_no_upscale", "validation_split",
    )},
    **_keys("dataset", ValidationSection, validation_seed="seed"),
    "network_multiplier": DatasetKey("dataset", Section, ""),
    **_keys("subset", SubsetSection, color_aug="color_aug", face_crop_aug_range="face_crop_range", flip_aug="flip",
            num_repeats="repeats", random_crop="random_crop", resize_interpolation="resize_interpolation",
            custom_attributes="custom_attributes"),
    **_keys("subset", CaptionSection, shuffle_caption="shuffle", keep_tokens="keep_tokens",
            keep_tokens_separator="keep_tokens_separator", secondary_separator="secondary_separator",
            caption_separator="separator", enable_wildcard="enable_wildcard", token_warmup_min="token_warmup_min",
            token_warmup_step="token_warmup_step", caption_prefix="prefix", caption_suffix="suffix",
            caption_dropout_every_n_epochs="dropout_every_n_epochs", caption_dropout_rate="dropout_rate",
            caption_tag_dropout_rate="tag_dropout_rate"),
    "caption_extension": DatasetKey("subset", CaptionSection, "extension", ("dreambooth", "controlnet")),
    "class_tokens": DatasetKey("subset", SubsetSection, "class_tokens", ("dreambooth",)),
    "cache_info": DatasetKey("subset", Section, "", ("dreambooth", "controlnet")),
    "image_dir": DatasetKey("own", SubsetSection, "image_dir"),
    "is_reg": DatasetKey("own", SubsetSection, "is_reg", ("dreambooth",)),
    "alpha_mask": DatasetKey("own", SubsetSection, "alpha_mask", ("dreambooth", "finetune")),
    "metadata_file": DatasetKey("own", SubsetSection, "metadata_file", ("finetune",)),
    "conditioning_data_dir": DatasetKey("own", SubsetSection, "conditioning_dir", ("controlnet",)),
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
    if what := unsupported_value(value):
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
        key.section.model_validate_json(json.dumps({key.field: converted(name, value)}), strict=True)
    except ValidationError as error:
        what, remedy = wrong_in(key.section, error.errors(include_url=False)[0])
        return what, remedy or SHAPES.get(name, "")
    return None


def converted(name: str, value: Any) -> Any:
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


Table = dict[str, Any]


@dataclass
class Resolved:
    """The data sets of a file, what went wrong, and what is worth saying.

    overridden: "section.field" of the command line's values that no data set takes, since the file sets all.
    masked: the masks that the file names count, whatever loss.masked says.
    """

    datasets: tuple[DatasetSection, ...] = ()
    validation_seed: int | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    overridden: set[str] = field(default_factory=set)
    masked: bool = False


def resolve(path: Path, cfg: TrainConfig) -> Resolved:
    """Read a file and settle every setting of its data sets; `cfg` is what the command line says."""
    out = Resolved()
    try:
        tables = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        out.faults.append(
            Fault(f"{option('data.dataset_config')}={path}", "no such file", "give a TOML file of data sets")
        )
        return out
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        out.faults.append(Fault(f"{option('data.dataset_config')}={path}", f"cannot be read as TOML: {error}"))
        return out
    _KohyaResolver(path, cfg, out).take(tables)
    return out


def applied(cfg: TrainConfig, found: Resolved) -> TrainConfig:
    """Put data sets into a configuration.

    What is said of a run as a whole becomes theirs: the largest batch, picture and share that is held out.
    """
    datasets = found.datasets
    if not datasets:
        return cfg
    largest = max((each.resolution or (0, 0) for each in datasets), key=lambda size: size[0] * size[1])
    seed = cfg.validation.seed if found.validation_seed is None else found.validation_seed
    changes: dict[str, dict[str, Any]] = {
        "loss": {"masked": cfg.loss.masked or found.masked},
        "data": {"datasets": datasets, "resolution": largest if all(largest) else None},
        "training": {"batch_size": max(each.batch_size for each in datasets)},
        "validation": {"split": max(each.validation_split for each in datasets), "seed": seed},
    }
    return cfg.model_copy(
        update={name: getattr(cfg, name).model_copy(update=fields) for name, fields in changes.items()}
    )


class _KohyaResolver:
    """One reading of one file. A value that does not fit is a fault, and left out so that the rest can be judged."""

    def __init__(self, path: Path, cfg: TrainConfig, out: Resolved) -> None:
        self.path, self.cfg, self.out = path, cfg, out
        self.fell_back: set[str] = set()  # fields of the command line that some data set takes
        self.seeds: set[int | None] = set()

    def take(self, tables: Table) -> None:
        for name in sorted(tables.keys() - {"general", "datasets"}):
            if name == "directory":
                self.fault(name, "is of diffusion-pipe's data set TOML", "train.py takes such files: --dataset")
                continue
            self.fault(name, "no such table", did_you_mean(name, ("general", "datasets")) or "[general], [[datasets]]")
        general = self.checked(tables.get("general", {}), "[general]", "[general]")
        datasets = self.listed(tables.get("datasets"), "[[datasets]]")
        found = [self.dataset(each, f"[[datasets]] {n}", general) for n, each in enumerate(datasets, 1)]
        self.out.datasets = tuple(each for each in found if each.subsets)
        if not self.out.datasets and not self.out.faults:
            self.fault("[[datasets]]", "every subset is left out, since num_repeats = 0", "give one at least 1")
        if len(self.seeds) > 1:
            self.fault("validation_seed", "differs between data sets", "one seed decides for all what is held out")
        elif self.seeds:
            self.out.validation_seed = self.seeds.pop()
        self.out.overridden = OVERRIDABLE - self.fell_back
        if self.out.validation_seed is not None:
            self.out.overridden.add("validation.seed")

    def fault(self, place: str, what: str, remedy: str = "") -> None:
        self.out.faults.append(Fault(f"{self.path} {place}", what, remedy))

    def listed(self, tables: Any, place: str) -> list[Table]:
        """Return an array of tables, which must have at least one."""
        if isinstance(tables, dict):
            tables = [tables]
        if isinstance(tables, list) and tables and all(isinstance(each, dict) for each in tables):
            return tables
        self.fault(place, "is missing" if not tables else "must be a list of tables", f"begin each with {place}")
        return []

    def checked(self, table: Any, kind: str, place: str) -> Table:
        """Return the entries of a table that are right."""
        if not isinstance(table, dict):
            self.fault(place, "must be a table", f"write {kind} above its keys")
            return {}
        right = {}
        for name, value in table.items():
            fault = misplaced(name, kind) or wrong(name, value)
            if fault:
                self.fault(f"{place} {name}", *fault)
            else:
                right[name] = value
        return right

    def dataset(self, table: Table, place: str, general: Table) -> DatasetSection:
        """Resolve one data set with its subsets."""
        subsets = self.listed(table.get("subsets"), "[[datasets.subsets]]") if "subsets" in table else []
        if not subsets:
            self.fault(place, "has no subset", "begin each with [[datasets.subsets]]")
        own = self.checked({name: value for name, value in table.items() if name != "subsets"}, "[[datasets]]", place)
        levels = (own, general)
        values = {name: self.value(name, levels) for name in _DATASET_FIELDS}
        if "validation_seed" in own or "validation_seed" in general:
            self.seeds.add(own.get("validation_seed", general.get("validation_seed")))
        if values["resolution"] is None and not any(fault.where.endswith(" resolution") for fault in self.out.faults):
            self.fault(place, "resolution is missing", "give a number, or [width, height]; for SDXL 1024")
        made: list[SubsetSection] = []
        for n, each in enumerate(subsets, 1):
            subset = self.subset(each, f"{place} [[datasets.subsets]] {n}", levels)
            if subset is not None and (subset.image_dir, subset.metadata_file) in [
                (one.image_dir, one.metadata_file) for one in made
            ]:
                self.note(place, f"{subset.metadata_file or subset.image_dir} stands there twice: the first counts")
            elif subset is not None:
                made.append(subset)
        if made and all(subset.is_reg for subset in made):
            self.fault(place, "has nothing but regularisation pictures", "add a subset to train on")
        return DatasetSection(**values, subsets=tuple(made))

    def note(self, place: str, what: str) -> None:
        self.out.notes.append(f"{self.path} {place}: {what}")

    def subset(self, table: Table, place: str, levels: tuple[Table, ...]) -> SubsetSection | None:
        """Resolve one subset; None where it cannot be used, or asks not to be."""
        own = self.checked(table, "[[datasets.subsets]]", place)
        kind = kind_of(table)

        # the keys tell of what kind it is; those of another kind mean nothing in it
        if {"metadata_file", "conditioning_data_dir"} <= own.keys():
            self.fault(place, "has both metadata_file and conditioning_data_dir", "a subset is of one kind")
        for name in sorted(own):
            if kind not in KEYS[name].kinds and name not in ("metadata_file", "conditioning_data_dir"):
                self.fault(f"{place} {name}", f"means nothing beside {_MARK[kind]}", "leave it out")

        # the innermost table that names a value has the last word on it
        values = {name: self.value(name, (own, *levels)) for name in _SUBSET_FIELDS if kind in KEYS[name].kinds}
        captions = {KEYS[name].field: self.value(name, (own, *levels)) for name in _CAPTION_FIELDS}
        fields = {KEYS[name].field: value for name, value in values.items()}
        masks = own.get("conditioning_data_dir") if kind == "controlnet" else None
        fields["conditioning_dir"] = masks or self.cfg.data.conditioning_dir
        fields["image_dir"], fields["metadata_file"] = own.get("image_dir"), own.get("metadata_file")

        # what a subset of this kind cannot do without, and what leaves it out
        if missing := list(_missing(kind, own)):
            for name, what, remedy in missing:
                if not (name in table and name not in own):  # a value of the wrong type has been named
                    self.fault(f"{place} {name}", what, remedy)
        if fields["repeats"] == 0:
            self.note(place, "left out, since num_repeats = 0")
            return None
        if kind != "finetune" and not fields["image_dir"]:
            return None
        told = self.cfg.captions.model_copy(update=captions)
        return SubsetSection(**fields, captions=told, flat=kind != "finetune")

    def value(self, name: str, levels: tuple[Table, ...]) -> Any:
        """Return the value of the innermost table that has one, else the command line's."""
        for table in levels:
            if name in table:
                return converted(name, table[name])
        place = _FALLBACKS.get(name)
        if place is None:
            return SubsetSection.model_fields[KEYS[name].field].default
        self.fell_back.add(place)
        section, _, entry = place.partition(".")
        found = getattr(getattr(self.cfg, section), entry)
        return found[0] if name == "num_repeats" else found


_MARK = {"dreambooth": "image_dir alone", "finetune": "metadata_file", "controlnet": "conditioning_data_dir"}
_DATASET_FIELDS = [name for name, key in KEYS.items() if key.section is DatasetSection]
_CAPTION_FIELDS = [name for name, key in KEYS.items() if key.section is CaptionSection]
_SUBSET_FIELDS = [
    name for name, key in KEYS.items() if key.section is SubsetSection and name not in (
        "image_dir", "metadata_file", "conditioning_data_dir",
    )
]  # fmt: skip
# key -> field of the command line that it falls back to
_FALLBACKS: dict[str, str] = {
    **{name: f"data.{name}" for name in SizeSection.model_fields},
    **{name: f"data.{key.field}" for name, key in KEYS.items() if key.field in PictureSection.model_fields},
    **{name: f"captions.{KEYS[name].field}" for name in _CAPTION_FIELDS},
    "batch_size": "training.batch_size",
    "num_repeats": "data.repeats",
    "validation_split": "validation.split",
}
OVERRIDABLE = set(_FALLBACKS.values()) - {"data.conditioning_dir"}


def _missing(kind: str, own: Table) -> Iterator[tuple[str, str, str]]:
    """Find what a subset names that is not there, or does not name: (key, what is wrong, what would be right)."""
    required = "metadata_file" if kind == "finetune" else "image_dir"
    if required not in own:
        yield required, "is missing", f"every subset of this kind needs {required}"
    for name, is_there, word in (
        ("image_dir", lambda text: not hub_ids.missing(text), "folder"),
        ("metadata_file", lambda text: is_file(expanded(text)), "file"),
        ("conditioning_data_dir", lambda text: is_folder(expanded(text)), "folder"),
    ):
        if name in own and not is_there(own[name]):
            yield name, f"no such {word}: {own[name]!r}", f"give the path of a {word}"
