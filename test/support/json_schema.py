"""A check of values against JSON schemas of draft 7, as far as ours go: no package of the test environment has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_LENGTHS = {"minItems": (list, 1), "maxItems": (list, -1), "minLength": (str, 1), "maxLength": (str, -1)}
_SAYING = {
    "title", "description", "default", "deprecated", "x-taplo", "$schema", "$id", "$defs", "examples",
}  # what judges no value  # fmt: skip
_JUDGING = {
    "$ref", "type", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items",
    *_BOUNDS, *_LENGTHS,
}  # fmt: skip


def misfits(
    schema: Mapping[str, Any], value: Any, root: Mapping[str, Any] | None = None, at: str = ""
) -> Iterator[str]:
    """Yield where a value is not what a schema says: the path, and the word of the schema that says so."""
    root = schema if root is None else root
    unknown = schema.keys() - _SAYING - _JUDGING
    assert not unknown, f"{at}: {sorted(unknown)} is not checked here"
    if "$ref" in schema:
        yield from misfits(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root, at)

    # --- the value itself
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_TYPES[name](value) for name in types):
        yield f"{at} type"
        return
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        yield f"{at} enum"
    if "const" in schema and value != schema["const"]:
        yield f"{at} const"
    if "anyOf" in schema and not any(not list(misfits(choice, value, root, at)) for choice in schema["anyOf"]):
        yield f"{at} anyOf"
    for word, fits in _BOUNDS.items():
        if word in schema and _TYPES["number"](value) and not fits(value, schema[word]):
            yield f"{at} {word}"
    for word, (kind, sign) in _LENGTHS.items():
        if word in schema and isinstance(value, kind) and sign * len(value) < sign * schema[word]:
            yield f"{at} {word}"

    # --- what is inside
    if isinstance(value, list):
        items = schema.get("items", {})
        each_of = items if isinstance(items, list) else [items] * len(value)
        for place, (inner, each) in enumerate(zip(each_of, value, strict=False)):
            yield from misfits(inner, each, root, f"{at}[{place}]")
    if isinstance(value, dict):
        yield from (f"{at}.{name} required" for name in schema.get("required", ()) if name not in value)
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, each in value.items():
            if name in properties:
                yield from misfits(properties[name], each, root, f"{at}.{name}")
            elif others is False:
                yield f"{at}.{name} additionalProperties"
            elif isinstance(others, dict):
                yield from misfits(others, each, root, f"{at}.{name}")
