"""What can be said of every key of train.py, for --help and docs/train_toml.md, and the JSON schema of its files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from difftrain.config.layers import ONE_NUMBER
from difftrain.config.resolve import DOOR_DEFAULTS, EMA_DEFAULTS
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import OFFERED, default_of, form_of, section_class
from difftrain.config.spellings.flags import flag_of
from difftrain.config.spellings.keys import CONSTRUCTOR, KEYS, SWAPPED, TABLES, Key, key_of
from difftrain.config.spellings.train_words import in_own_words
from difftrain.config.toml import value_text
from difftrain.models.registry import TRAINED

# fields that are written by what reads the files, and never by hand
WRITTEN = frozenset({"data.datasets", "eval.sets"})
_DEFAULTS = {
    "?batch": 1,
    "?checkpointing": False,
    "?stages": 1,
    "?masters": True,
    "?wandb": False,
    "?caching_batch": 32,
}
_CHOICES = {
    "?family": TRAINED,
    "?engine": ("native", "accelerate", "deepspeed"),
    "?clip_mode": ("single_beginning", "single_middle"),
}
_KINDS = {"bool": "true|false", "int": "N", "number": "X", "str": "TEXT", "any": "..."}
_SAYS = {
    "output": "Where a run goes, and what it reads.",
    "optimization": "Memory and speed; keys of [training] may stand here, and the other way round.",
    "adapter": "Adapters: known, and not built yet.",
    "monitoring": "Where numbers go.",
    "engine": "What runs the steps, on what.",
}


class Row(NamedTuple):
    """One key: the table that it is written in, other places, its values, meaning and default, and the field."""

    table: str
    name: str
    others: tuple[str, ...]
    values: str
    help: str
    default: str
    field: str


def says(table: str) -> str:
    """Return one line about a table."""
    if table in _SAYS:
        return _SAYS[table]
    return (section_class(table).__doc__ or "").splitlines()[0]


def rows(table: str) -> Iterator[Row]:
    """Yield what may be written in a table: its keys, then the fields that have none."""
    for key in KEYS:
        if key.home == table and key.status == "offered" and table != "adapter":
            yield _key_row(key)
    if table not in TrainConfig.model_fields:
        return
    for name in section_class(table).model_fields:
        path = f"{table}.{name}"
        if (
            key_of(path) is None
            and path not in WRITTEN
            and not any(key.name == name and key.home == table for key in KEYS)
        ):
            yield Row(table, name, (), _values(path), _meaning(path), _default(path), path)


def not_built() -> list[Key]:
    """Return the keys that are known and not built yet."""
    return [key for key in KEYS if key.status == "later"]


def nearest() -> list[Key]:
    """Return the keys that mean the nearest thing here."""
    return [key for key in KEYS if key.status == "nearest"]


def every_table() -> tuple[str, ...]:
    """Return the tables that have rows, canonical ones first."""
    return tuple(table for table in TABLES if any(True for _ in rows(table)))


def _key_row(key: Key) -> Row:
    field = "" if key.to.startswith("?") else key.to
    others = tuple(table for table in key.tables if table != key.home)
    values = "|".join(map(_spelt, key.words)) if key.words else _values(field) if field else _KINDS.get(key.kind, "...")
    values = "|".join(_CHOICES[key.to]) if key.to in _CHOICES else values
    default = _default(field) if field else _spelt(_DEFAULTS[key.to]) if key.to in _DEFAULTS else ""
    if key.words and field:
        default = next((_spelt(word) for word, mine in key.words.items() if mine == default_of(field)), "")
    return Row(key.home, key.name, others, values, in_own_words(key.help), default, field)


def _spelt(value: object) -> str:
    return value if isinstance(value, str) else value_text(value)


def _meaning(path: str) -> str:
    section, _, name = path.partition(".")
    flag = flag_of(path)
    told = section_class(section).model_fields[name].description
    return in_own_words(told or (flag.help if flag else ""))


def _values(path: str) -> str:
    section, _, name = path.partition(".")
    form = form_of(section_class(section).model_fields[name].annotation)
    form = "|".join(map(str, OFFERED.get(path, ()))) or form
    return f"{ONE_NUMBER[path]}|{form}" if path in ONE_NUMBER else form


def _default(path: str) -> str:
    value = {**DOOR_DEFAULTS, **EMA_DEFAULTS}.get(path, default_of(path))
    return "" if value in (None, "", (), {}) else _spelt(value)


_TYPES = {"bool": "boolean", "int": "integer", "number": "number", "str": "string"}


def schema_of_files() -> dict[str, Any]:
    """Return the schema; what is not built yet is in it, marked as deprecated, so that an editor says why."""
    definitions: dict[str, Any] = {}
    sections = TrainConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions |= sections["$defs"]
    properties: dict[str, Any] = {}
    for table in TABLES:
        properties[table] = {
            "type": "object",
            "description": says(table),
            "properties": _of_table(table, definitions),
            "additionalProperties": table == CONSTRUCTOR,
        }
    flat = {key.name: _key_schema(key, definitions) for key in KEYS if "" in key.tables}
    both = flat.keys() & properties.keys()  # engine = "..." at the top, and [engine]
    for name in both:
        properties[name] = {"anyOf": [properties[name], flat[name]]}
    return {
        "title": "train.py",
        "type": "object",
        "properties": {**{name: each for name, each in flat.items() if name not in both}, **properties},
        "additionalProperties": False,
        "$defs": definitions,
    }


def _of_table(table: str, definitions: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (SWAPPED.get(table), table):
        if name in TrainConfig.model_fields:
            found |= {
                field: _field_schema(f"{name}.{field}", definitions) for field in section_class(name).model_fields
            }
    for key in KEYS:
        if table in key.tables or SWAPPED.get(table) in key.tables:
            found[key.name] = _key_schema(key, definitions)
    return found


def _field_schema(path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    section, _, name = path.partition(".")
    told = dict(definitions[section_class(section).__name__]["properties"][name])
    if path in ONE_NUMBER:
        own = {word: told.pop(word) for word in ("anyOf", "type", "items", "minItems", "maxItems") if word in told}
        told["anyOf"] = [*own.pop("anyOf", [own]), {"type": "integer" if ONE_NUMBER[path] == "N" else "number"}]
    return told


def _key_schema(key: Key, definitions: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if key.words:
        told["enum"] = list(key.words)
    elif key.to and not key.to.startswith("?"):
        told = _field_schema(key.to, definitions)
        told.pop("default", None)
    elif key.kind in _TYPES:
        told["type"] = _TYPES[key.kind]
    told["description"] = key.help
    if key.status == "later":
        told["deprecated"] = True
    return told
