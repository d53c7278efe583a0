"""Turn plain values into sections, with a sentence for every value that does not fit; how a value of a field is written."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.section import Section
from difftrain.config.schema.sections import TrainConfig

_MOST = 2**63 - 1


def unsupported_value(value: Any) -> str:
    """Say why nothing can be done with a value; nothing of most."""
    for leaf in _leaves(value):
        if not isinstance(leaf, str | bool | int | float | None):
            return "must not be a date or a time"
        if isinstance(leaf, str) and ("\0" in leaf or any("\ud800" <= letter <= "\udfff" for letter in leaf)):
            return f"contains what is not text: {leaf!r}"
        if isinstance(leaf, int) and abs(leaf) > _MOST:
            return f"is beyond the whole numbers of TOML, {_MOST} at most"
    return ""


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


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
        forms = list(dict.fromkeys(form_of(argument) for argument in inside if argument is not type(None)))
        return "X" if set(forms) == {"N", "X"} else "|".join(forms)
    if origin is tuple:
        return f"[{form_of(inside[0])}, ...]" if inside[-1] is ... else f"[{', '.join(map(form_of, inside))}]"
    if origin is dict:
        return "{name = " + form_of(inside[1]) + "}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "{...}"
    return _SCALARS.get(annotation, "...")


def expected_form(annotation: Any, kind: str) -> str:
    """Say what a value must be, by pydantic's word for what is wrong with it; nothing where that is not its type."""
    form, mine = form_of(annotation), _KINDS.get(kind.partition("_")[0], "")
    wrong_type = kind.endswith(("_type", "_parsing", "_from_float"))
    if kind in _LISTS:
        return _WORDS.get(form) or f"{'a table' if form.startswith('{') else 'a list'}, {form}"
    if not wrong_type or not mine:
        return ""
    return _WORDS.get(form) or _WORDS[mine]


Values = dict[str, dict[str, Any]]  # section -> field -> value
Misfit = tuple[str, str, str, str]  # section, field, what is wrong, what would be right


def fields() -> Iterator[str]:
    """Yield "section.field" of the whole configuration, in the order of sections.py."""
    for section, info in TrainConfig.model_fields.items():
        assert info.annotation is not None
        for field in info.annotation.model_fields:
            yield f"{section}.{field}"


def section_class(section: str) -> type[Section]:
    """Return the class of a section."""
    annotation = TrainConfig.model_fields[section].annotation
    assert isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation


def _info(path: str) -> FieldInfo:
    section, _, field = path.partition(".")
    return section_class(section).model_fields[field]


def default_of(path: str) -> Any:
    """Return the default of "section.field"."""
    return _info(path).default


def description_of(path: str) -> str:
    """Return what "section.field" means; other settings are named in braces (config/spellings/spelling.py)."""
    return (_info(path).description or "") if path else ""


def choices_of(path: str) -> tuple[Any, ...]:
    """Return the values that "section.field" offers, or nothing where it is open."""
    if path.startswith("?"):
        return ()
    return _choices(_info(path).annotation)


def _choices(annotation: Any) -> tuple[Any, ...]:
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    options = typing.get_args(annotation) if union else (annotation,)
    return tuple(v for option in options if typing.get_origin(option) is Literal for v in typing.get_args(option))


def build(values: Values) -> tuple[TrainConfig, list[Misfit]]:
    """Validate values; one that does not fit is reported and left at its default, so that the rest can be judged."""
    misfits: list[Misfit] = []
    sections = {}
    for section, section_values in values.items():
        sections[section], section_misfits = build_section(section, section_values)
        misfits += section_misfits
    return TrainConfig.model_validate(sections), misfits


def build_section(section: str, section_values: dict[str, Any]) -> tuple[Section, list[Misfit]]:
    """Validate one section, as build does."""
    cls = section_class(section)
    try:
        return cls(**section_values), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    misfits = [misfit_of(section, detail) for detail in details]
    bad = {str(detail["loc"][0]) for detail in details}
    return cls(**{k: v for k, v in section_values.items() if k not in bad}), list(dict.fromkeys(misfits))


def misfit_of(section: str, detail: ErrorDetails) -> Misfit:
    """Say what is wrong with a value, in words of a user."""
    first, *deeper = detail["loc"]
    cls = section_class(section)
    if str(first) not in cls.model_fields:
        deeper = []
    what, remedy = wrong_in(cls, detail)
    inside = " ".join(str(step + 1) if isinstance(step, int) else str(step) for step in deeper)
    return section, str(first), f"{inside}: {what}" if _is_nested(cls, str(first)) and inside else what, remedy


def wrong_in(cls: type[Section], detail: ErrorDetails) -> tuple[str, str]:
    """Say what is wrong with a value somewhere in a section, and what would be right."""
    owner, field = _owner(cls, detail["loc"])
    got = show(detail["input"])
    ctx = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            names = owner.model_fields
            return "no such key", did_you_mean(field, names) or f"known are {', '.join(names)}"
        # bounds
        case "greater_than_equal":
            return f"must be at least {show(ctx['ge'])}, got {got}", ""
        case "greater_than":
            return f"must be above {show(ctx['gt'])}, got {got}", ""
        case "less_than_equal":
            return f"must be at most {show(ctx['le'])}, got {got}", ""
        case "less_than":
            return f"must be below {show(ctx['lt'])}, got {got}", ""
        # words to choose from
        case "literal_error":
            choices = _choices(owner.model_fields[field].annotation)
            words = ", ".join(str(choice) for choice in choices)
            guess = did_you_mean(str(detail["input"]), [str(choice) for choice in choices])
            return f"must be one of {words}; got {got}", guess
        case "finite_number":
            return f"must be a finite number, got {got}", ""
        # all else: the form that the field has
        case kind:
            info = owner.model_fields.get(field)
            expected = expected_form(info.annotation, kind) if info is not None else ""
            expected = f"must be {expected}" if expected else f"{detail['msg'][:1].lower()}{detail['msg'][1:]}"
            return f"{expected}, got {got}", ""


def _owner(cls: type[Section], loc: tuple[int | str, ...]) -> tuple[type[Section], str]:
    """Return the innermost section on the way to a value, and the name of its field."""
    field = str(loc[0])
    for step in loc[1:]:
        inner = _section_in(cls.model_fields[field].annotation) if field in cls.model_fields else None
        if isinstance(step, str) and inner is not None:
            cls, field = inner, step
    return cls, field


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the kind of section that a field holds, or a tuple of."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _is_nested(cls: type[Section], field: str) -> bool:
    return field in cls.model_fields and _section_in(cls.model_fields[field].annotation) is not None


def show(value: Any) -> str:
    """Write a value into a message: short, and numbers as people write them."""
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        return str(int(value))
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
