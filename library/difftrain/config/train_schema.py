"""The JSON schema of train.py's files: every table, and the flat keys at the top."""

from __future__ import annotations

from typing import Any

from difftrain.config.sections import TrainConfig
from difftrain.config.toml_key import Key
from difftrain.config.toml_keys import CONSTRUCTOR, KEYS, SWAPPED, TABLES
from difftrain.config.train_rows import says
from difftrain.config.train_values import ONE_NUMBER
from difftrain.config.validate import section_class

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
    flat = {key.name: _of_key(key, definitions) for key in KEYS if "" in key.tables}
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
            found |= {field: _of_field(f"{name}.{field}", definitions) for field in section_class(name).model_fields}
    for key in KEYS:
        if table in key.tables or SWAPPED.get(table) in key.tables:
            found[key.name] = _of_key(key, definitions)
    return found


def _of_field(path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    section, _, name = path.partition(".")
    told = dict(definitions[section_class(section).__name__]["properties"][name])
    if path in ONE_NUMBER:
        own = {word: told.pop(word) for word in ("anyOf", "type", "items", "minItems", "maxItems") if word in told}
        told["anyOf"] = [*own.pop("anyOf", [own]), {"type": "integer" if ONE_NUMBER[path] == "N" else "number"}]
    return told


def _of_key(key: Key, definitions: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if key.words:
        told["enum"] = list(key.words)
    elif key.to and not key.to.startswith("?"):
        told = _of_field(key.to, definitions)
        told.pop("default", None)
    elif key.kind in _TYPES:
        told["type"] = _TYPES[key.kind]
    told["description"] = key.help
    if key.status == "later":
        told["deprecated"] = True
    return told
