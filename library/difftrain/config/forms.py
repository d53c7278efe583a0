"""What a value of a field looks like: in tables of keys, and in messages about values that do not fit."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal

from difftrain.config.section import Section

_WORDS = {"true|false": "true or false", "N": "a whole number", "X": "a number", "TEXT": "text in quotes"}
_SCALARS: dict[Any, str] = {bool: "true|false", int: "N", float: "X", str: "TEXT"}
_KINDS = {"bool": "true|false", "int": "N", "float": "X", "string": "TEXT"}  # beginnings of pydantic's error types
_LISTS = (
    "tuple_type",
    "list_type",
    "dict_type",
    "model_type",
    "model_attributes_type",
    "too_short",
    "too_long",
    "missing",
)


def form_of(annotation: Any) -> str:
    """Return how a value is written: N, X, TEXT, true|false, the words to choose from, or a list or table of such."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return form_of(inside[0])
    if origin is Literal:
        return "|".join(map(str, inside))
    if origin in (types.UnionType, typing.Union):
        forms = list(dict.fromkeys(form_of(each) for each in inside if each is not type(None)))
        return "X" if set(forms) == {"N", "X"} else "|".join(forms)
    if origin is tuple:
        return f"[{form_of(inside[0])}, ...]" if inside[-1] is ... else f"[{', '.join(map(form_of, inside))}]"
    if origin is dict:
        return "{name = " + form_of(inside[1]) + "}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "{...}"
    return _SCALARS.get(annotation, "...")


def needed(annotation: Any, kind: str) -> str:
    """Say what a value must be, by pydantic's word for what is wrong with it; nothing where that is not its type."""
    form, mine = form_of(annotation), _KINDS.get(kind.partition("_")[0], "")
    wrong_type = kind.endswith(("_type", "_parsing", "_from_float"))
    if kind in _LISTS:
        return _WORDS.get(form) or f"{'a table' if form.startswith('{') else 'a list'}, {form}"
    if not wrong_type or not mine:
        return ""
    return _WORDS.get(form) or _WORDS[mine]
