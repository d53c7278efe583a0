"""JSON schemas for editors: which there are, and those of a run's own files, from fields and keys.

They are of draft 7, which editors of TOML read. schemas/ holds them as files, and a test holds the files to this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from difftrain.config.layers import ONE_NUMBER
from difftrain.config.render.keys import says
from difftrain.config.render.schema_other import schema_of_arguments, schema_of_directories, schema_of_subsets
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import section_class
from difftrain.config.spellings.keys import CONSTRUCTOR, KEYS, SWAPPED, TABLES
from difftrain.config.spellings.row import Row
from difftrain.config.spellings.spelling import fill_in, meaning, option
from difftrain.models.registry import FAMILIES

_TYPES = {"bool": "boolean", "int": "integer", "number": "number", "str": "string"}


def schema_of_sections() -> dict[str, Any]:
    """Return the schema of the sectioned TOML: every field with its type, range, default and meaning."""
    return _described(lambda path, value: path if value is None else f"{path} = {str(value).lower()}")


def schema_of_files() -> dict[str, Any]:
    """Return the schema of train.py's files.

    What is not built yet is in it, marked as deprecated, so that an editor says why.
    """
    definitions = _described(partial(option, door="train"))["$defs"]
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
        "title": "TOML of train.py",
        "type": "object",
        "properties": {**{name: entry for name, entry in flat.items() if name not in both}, **properties},
        "additionalProperties": False,
        "$defs": definitions,
    }


def _described(spell: Callable[[str, Any], str]) -> dict[str, Any]:
    """Return pydantic's schema, where the meanings of fields name others as they are spelt here."""
    schema = TrainConfig.model_json_schema() | {"title": "sectioned TOML of difftrain"}
    for definition in schema["$defs"].values():
        for field in definition["properties"].values():
            field["description"] = fill_in(field["description"], spell)
    return schema


def _of_table(table: str, definitions: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name in (SWAPPED.get(table), table):
        if name in TrainConfig.model_fields:
            properties |= {
                field: _field_schema(f"{name}.{field}", definitions) for field in section_class(name).model_fields
            }
    for key in KEYS:
        if table in key.tables or SWAPPED.get(table) in key.tables:
            properties[key.name] = _key_schema(key, definitions)
    return properties


def _field_schema(path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    section, _, name = path.partition(".")
    result = dict(definitions[section_class(section).__name__]["properties"][name])
    if path in ONE_NUMBER:
        own = {word: result.pop(word) for word in ("anyOf", "type", "items", "minItems", "maxItems") if word in result}
        result["anyOf"] = [*own.pop("anyOf", [own]), {"type": "integer" if ONE_NUMBER[path] == "N" else "number"}]
    return result


def _key_schema(key: Row, definitions: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if key.words:
        result["enum"] = list(key.words)
    elif key.choices:
        result["enum"] = list(key.choices)
    elif key.to and not key.to.startswith("?"):
        result = _field_schema(key.to, definitions)
        result.pop("default", None)
    elif key.kind in _TYPES:
        result["type"] = _TYPES[key.kind]
    result["description"] = meaning(key, "train")
    if key.to == "?family":
        titles = [FAMILIES[name].title for name in key.choices]
        result["x-taplo"] = {"docs": {"enumValues": titles}}  # what an editor shows beside each value
    if key.status == "later":
        result["deprecated"] = True
    return result


# ------------------------------------------------------------------ all of them


@dataclass(frozen=True)
class SchemaFile:
    """The schema of one kind of file. about: which file that is, and who reads it."""

    about: str
    build: Callable[[], dict[str, Any]]


SCHEMAS: dict[str, SchemaFile] = {
    "run": SchemaFile("TOML of train.py (--config), sectioned or flat as diffusion-pipe's", schema_of_files),
    "sections": SchemaFile(
        "sectioned TOML of the kohya entry points (--config), and a run's config.toml", schema_of_sections
    ),
    "arguments": SchemaFile("kohya's TOML of arguments (--config_file): names of flags", schema_of_arguments),
    "dataset": SchemaFile("dataset TOML of train.py: [[directory]], as diffusion-pipe's", schema_of_directories),
    "dataset_kohya": SchemaFile("kohya's dataset TOML (--dataset_config): [general], [[datasets]]", schema_of_subsets),
}
DEFAULT = "run"


def schema(name: str) -> dict[str, Any]:
    """Return a schema as it is written to a file."""
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "$id": f"urn:difftrain:schema:{name}"}
    return head | {"description": SCHEMAS[name].about} | _draft_7(SCHEMAS[name].build())


def _draft_7(node: Any) -> Any:
    """Spell what newer drafts call otherwise: the places of a list."""
    if isinstance(node, list):
        return [_draft_7(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {"items" if key == "prefixItems" else key: _draft_7(value) for key, value in node.items()}
