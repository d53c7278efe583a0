"""Layers of values: one key as it is written, what one source says of all fields, and the file of train.py as a layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from difftrain.config.constructors import NPU_FUSED_ADAMW
from difftrain.config.document import text_of, toml_of
from difftrain.config.paths import recipes_named, resolve_path
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import misfit_of, section_class, show, unsupported_value
from difftrain.config.secrets import KNOWN, keep_in_environment, looks_secret, unfit_secret, variable_of
from difftrain.config.spellings.key_meanings import MEANINGS, KeyValue
from difftrain.config.spellings.keys import CONSTRUCTOR, KEYS, SWAPPED, TABLES, home_of, key_at
from difftrain.config.spellings.other_names import meant_key
from difftrain.config.spellings.row import Row, misfit
from difftrain.config.spellings.spelling import meaning
from difftrain.config.toml import origin
from difftrain.contracts.errors import Fault


@dataclass
class Layer:
    """What one source says: values by path, where each came from, and what went wrong or is worth saying."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    other_family: str = ""  # one that is not built yet
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)  # the flag that set a field

    def take(self, items: Iterable[KeyValue]) -> Layer:
        """Read keys; return this."""
        for item in items:
            self._take(item)
        return self

    def set(self, path: str, value: Any, origin: str) -> bool:
        """Say something of a field, and return whether that holds: a second voice that says otherwise is a fault."""
        if path in self.values and self.values[path] != value:
            what = f"contradicts {self.origins[path]}: {show(value)} here, {show(self.values[path])} there"
            self.faults.append(Fault(origin, what, "set it once"))
            return False
        self.values[path] = value
        self.origins.setdefault(path, origin)
        return True

    def fault(self, item: KeyValue, what: str, remedy: str = "", *, bad: str = "") -> None:
        """Note a fault; what is bad is not judged any further."""
        self.faults.append(Fault(item.origin, what, remedy))
        if bad:
            self.bad.add(bad)

    def _take(self, item: KeyValue) -> None:
        if what := unsupported_value(item.value):
            self.fault(item, what)
            return
        key = key_at(item.table, item.name)
        if key is not None:
            self._take_key(key, item)
        elif path := field_at(item.table, item.name):
            self._take_field(path, item)
        elif variable := variable_of(item.name):
            self._hide(variable, item)
        elif item.table == CONSTRUCTOR and not looks_secret(item.name, item.value):
            self.set(f"?optimizer_args.{item.name}", item.value, item.origin)
        else:
            self.fault(item, *_unknown(item))

    def _take_key(self, key: Row, item: KeyValue) -> None:
        if key.secret:
            self._hide(key.secret, item)
            return
        passes = any(item.value == passing and type(item.value) is type(passing) for passing in key.passes)
        if key.status == "later":
            if not passes:
                self.fault(item, "is not built yet", meaning(key, "train"))
            return
        if what := misfit(key, item.value):
            if item.text is None or misfit(key, item.text):
                self.fault(item, what, meaning(key, "train"), bad=key.to)
                return
            item = KeyValue(item.table, item.name, item.text, item.origin, item.folder)
        if key.status == "nearest" and not passes:
            self.notes.append(f"{item.origin}: {meaning(key, 'train')}")
        value = _worded(key, item.value)
        if key.words and value is None:
            self.fault(item, *_no_such_word(key, item.value), bad=key.to)
        elif key.to in MEANINGS:
            MEANINGS[key.to](self, item, value)
        elif key.to.startswith("?"):
            self.set(key.to, value, item.origin)
        elif key.to:
            self._take_field(key.to, KeyValue(item.table, item.name, value, item.origin, item.folder, item.text))

    def put(self, path: str, value: Any, item: KeyValue) -> None:
        """Say something of a field that a key means, where it fits that."""
        value, wrong = judged(path, value)
        if wrong:
            self.fault(item, *wrong, bad=path)
        else:
            self.set(path, value, item.origin)

    def _take_field(self, path: str, item: KeyValue) -> None:
        """Judge a value by its field, strictly: a number in quotes is no number, but on a command line all are words."""
        value, wrong = judged(path, item.value)
        if wrong and item.text is not None and not isinstance(item.value, str):
            value, other = judged(path, item.text)
            wrong = other and wrong
        if wrong:
            self.fault(item, *wrong, bad=path)
        else:
            self.set(path, self.path(item, value) if path in PATHS else value, item.origin)

    def path(self, item: KeyValue, value: Any) -> Any:
        """Settle a relative path: against the working directory, then against the file's folder."""
        if isinstance(value, list | tuple):
            return [self.path(item, entry) for entry in value]
        if not isinstance(value, str) or item.folder is None:
            return value
        resolved, wrong = resolve_path(value, item.folder)
        if wrong:
            self.fault(item, wrong, "write the whole path of one of them")
        return resolved

    def _hide(self, variable: str, item: KeyValue) -> None:
        if item.value == "":
            return
        if not isinstance(item.value, str) or not item.value.strip():
            self.fault(item, f"must be text in quotes, got {type(item.value).__name__}", f"or set {variable}")
            return
        if wrong := unfit_secret(variable, item.value):
            self.fault(item, wrong)
            return
        keep_in_environment(variable, item.value)
        message = f"moved to the environment as {variable}; give it there, where no other user can see it"
        self.notes.append(f"{item.origin}: {message}")


# fields that hold paths: they may be relative to a file's folder
PATHS = frozenset({
    "model.pretrained", "model.vae", "model.tokenizer1", "model.tokenizer2", "model.tokenizer3", "model.tokenizer4",
    "model.init_from_config",
    "model.transformer", "model.text_encoder1", "model.text_encoder2", "model.text_encoder3", "model.text_encoder4",
    "model.tokenizer_cache_dir", "data.dirs", "data.reg_dirs", "data.in_json", "data.conditioning_dir", "data.control_dirs",
    "data.cache_dir",
    "data.dataset_config", "save.output_dir", "save.preempt_file", "sample.prompts", "logging.logging_dir", "logging.tracker_config",
    "logging.console_file", "metadata.thumbnail", "repa.encoder", "deepspeed.offload_optimizer_nvme_path",
    "deepspeed.offload_param_nvme_path",
})  # fmt: skip


# fields that are lists and may be one number: a square, or the same for all
ONE_NUMBER = {"data.resolution": "N", "data.repeats": "N", "optimizer.text_encoder_lr": "X"}


def field_at(table: str, name: str) -> str:
    """Return "section.field" where a table is a section of our own with such a field, or nothing.

    What [training] has may stand in [optimization] too.
    """
    for section in (table, SWAPPED.get(table, "")):
        if section in TrainConfig.model_fields and name in section_class(section).model_fields:
            return f"{section}.{name}"
    return ""


def judged(path: str, value: Any) -> tuple[Any, tuple[str, str] | None]:
    """Return a value of a field, and what is wrong with it: (what, remedy) or nothing."""
    if what := unsupported_value(value):
        return value, (what, "")
    section, _, name = path.partition(".")
    cls = section_class(section)
    if path in ONE_NUMBER and isinstance(value, int | float) and not isinstance(value, bool):
        value = [value, value] if path == "data.resolution" else [value]
    try:
        cls.model_validate_json(json.dumps({name: value}), strict=True)
    except ValidationError as error:
        _, _, what, remedy = misfit_of(section, error.errors(include_url=False)[0])
        return value, (what, remedy)
    except (TypeError, ValueError):
        return value, (f"cannot be {show(value)}", "")
    return value, None


def _worded(key: Row, value: Any) -> Any:
    """Return what the field calls a value; None where it is none of the words."""
    if not key.words:
        return value
    folded = value.lower() if isinstance(value, str) else value
    return next((mine for word, mine in key.words.items() if word == folded and type(word) is type(folded)), None)


def _no_such_word(key: Row, value: Any) -> tuple[str, str]:
    words = [str(word) for word in key.words]
    return f"must be one of {', '.join(words)}; got {show(value)}", did_you_mean(str(value), words)


def _unknown(item: KeyValue) -> tuple[str, str]:
    """Say that a key is unknown, and which is most like it: in this table, else anywhere."""
    if home := home_of(item.name):
        return f"does not belong {_in(item.table)}", f"it belongs {home}"
    if item.table and item.table not in TABLES:
        return "no such table", did_you_mean(item.table, TABLES) or f"known are {', '.join(sorted(TABLES))}"
    own = keys_of(item.table)
    anywhere = {key.name for key in KEYS} | set(KNOWN)
    if not (meant := meant_key(item.name)) and len(homes := _sections_with(item.name)) == 1:
        return f"has no place {_in(item.table)}", f"it belongs in [{homes[0]}]"
    guess = meant or did_you_mean(item.name, own) or did_you_mean(item.name, anywhere)
    return "no such key", guess or (f"known are {', '.join(sorted(own))}" if item.table else "see --help for every key")


def _sections_with(name: str) -> list[str]:
    """Return the sections of our own that have a field of this name, or hand it to what they build."""
    sections = [section for section in TrainConfig.model_fields if name in section_class(section).model_fields]
    return [*sections, CONSTRUCTOR] if name in NPU_FUSED_ADAMW and CONSTRUCTOR not in sections else sections


def keys_of(table: str) -> set[str]:
    """Return every key that may stand in a table."""
    own = {key.name for key in KEYS if table in key.tables or SWAPPED.get(table) in key.tables}
    for section in {table, SWAPPED.get(table, "")} & set(TrainConfig.model_fields):
        own |= set(section_class(section).model_fields)
    return own


def _in(table: str) -> str:
    return f"in [{table}]" if table else "at the top of the file"


Table = dict[str, Any]


def read_file(path: Path) -> Layer:
    """Read a file into values by field, with every fault of it."""
    layer = Layer()
    try:
        tables = toml_of(text_of(path))
    except FileNotFoundError:
        layer.faults.append(
            Fault(f"--config={path}", "no such file", f"give a TOML file, such as one of {recipes_named()}")
        )
        return layer
    except (OSError, ValueError) as error:
        layer.faults.append(Fault(f"--config={path}", f"cannot be read as TOML: {error}"))
        return layer
    return layer.take(_items(path, tables, layer))


def _items(path: Path, tables: Table, layer: Layer) -> Iterator[KeyValue]:
    for name, value in tables.items():
        if name == "ema" and value == {}:  # the table itself asks for an average
            yield KeyValue(name, "enable", True, f"{path} [{name}]", path.parent)
        elif name in TABLES and isinstance(value, dict):
            for key, inner in value.items():
                yield KeyValue(name, key, inner, origin(path, name, key), path.parent)
        elif key_at("", name) is not None or not _is_table(value):
            if name in TABLES and key_at("", name) is None:
                layer.faults.append(Fault(f"{path} {name}", "is a table", f"write [{name}] above its keys"))
            else:
                yield KeyValue("", name, value, f"{path} {name}", path.parent)
        else:
            remedy = (
                f"it is a single table: write [{name}]"
                if name in TABLES
                else did_you_mean(name, TABLES) or f"known are {', '.join(sorted(TABLES))}"
            )
            if name in ("datasets", "directory", "general"):
                remedy = "datasets have a file of their own: name it as dataset in [output]"
            what = "is a list of tables" if name in TABLES else "no such table"
            layer.faults.append(Fault(f"{path} [{name}]", what, remedy))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))
