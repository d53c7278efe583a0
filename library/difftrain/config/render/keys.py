"""What can be said of every key of train.py, a line a key, for --help and docs/train_toml.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from difftrain.config.derive import DOOR_DEFAULTS, EMA_DEFAULTS
from difftrain.config.layers import ONE_NUMBER
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import default_of, form_of, section_class
from difftrain.config.spellings.keys import KEYS, TABLES, key_of
from difftrain.config.spellings.row import Row
from difftrain.config.spellings.spelling import field_meaning, meaning
from difftrain.config.toml import value_text

# fields that are written by what reads the files, and never by hand
WRITTEN = frozenset({"data.datasets", "eval.sets"})
_KINDS = {"bool": "true|false", "int": "N", "number": "X", "str": "TEXT", "any": "..."}
_SAYS = {
    "output": "Where a run goes, and what it reads.",
    "optimization": "Memory and speed; keys of [training] may stand here, and the other way round.",
    "adapter": "LoRA and its relatives: small weights that are trained in place of the model's (adapters.md).",
    "monitoring": "Where numbers go.",
    "engine": "What runs the steps, on what.",
}


class KeyLine(NamedTuple):
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


def lines(table: str) -> Iterator[KeyLine]:
    """Yield what may be written in a table: its keys, then the fields that have none."""
    for key in KEYS:
        if key.home == table and key.status == "offered" and table != "adapter":
            yield _key_line(key)
    if table not in TrainConfig.model_fields:
        return
    for name in section_class(table).model_fields:
        path = f"{table}.{name}"
        if (
            key_of(path) is None
            and path not in WRITTEN
            and not any(key.name == name and key.home == table for key in KEYS)
        ):
            yield KeyLine(table, name, (), _values(path), field_meaning(path, "train"), _default(path), path)


def not_built() -> list[Row]:
    """Return the keys that are known and not built yet."""
    return [key for key in KEYS if key.status == "later"]


def nearest() -> list[Row]:
    """Return the keys that mean the nearest thing here."""
    return [key for key in KEYS if key.status == "nearest"]


def every_table() -> tuple[str, ...]:
    """Return the tables that have rows, canonical ones first."""
    return tuple(table for table in TABLES if any(True for _ in lines(table)))


def _key_line(key: Row) -> KeyLine:
    field = "" if key.to.startswith("?") else key.to
    others = tuple(table for table in key.tables if table != key.home)
    values = "|".join(map(_spelt, (*key.words, *key.choices)))
    values = values or (_values(field) if field else _KINDS.get(key.kind, "..."))
    default = _default(field) if field else "" if key.default is None else _spelt(key.default)
    if key.words and field:
        default = next((_spelt(word) for word, mine in key.words.items() if mine == default_of(field)), "")
    return KeyLine(key.home, key.name, others, values, meaning(key, "train"), default, field)


def _spelt(value: object) -> str:
    return value if isinstance(value, str) else value_text(value)


def _values(path: str) -> str:
    section, _, name = path.partition(".")
    form = form_of(section_class(section).model_fields[name].annotation)
    return f"{ONE_NUMBER[path]}|{form}" if path in ONE_NUMBER else form


def _default(path: str) -> str:
    value = {**DOOR_DEFAULTS, **EMA_DEFAULTS}.get(path, default_of(path))
    return "" if value in (None, "", (), {}) else _spelt(value)
