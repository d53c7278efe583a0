"""Turn plain values into sections, with a sentence for every value that does not fit."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from difftrain.config.forms import needed
from difftrain.config.names import did_you_mean
from difftrain.config.sections import Section, TrainConfig
from difftrain.models.registry import TRAINED

Values = dict[str, dict[str, Any]]  # section -> field -> value
# of what a field may be, less is offered: a family can be known and not be trained yet, which a rule says
OFFERED: dict[str, tuple[Any, ...]] = {"model.family": TRAINED}
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


def choices_of(path: str) -> tuple[Any, ...]:
    """Return the values that "section.field" offers, or nothing where it is open."""
    return OFFERED.get(path) or _choices(_info(path).annotation)


def _choices(annotation: Any) -> tuple[Any, ...]:
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    options = typing.get_args(annotation) if union else (annotation,)
    return tuple(v for option in options if typing.get_origin(option) is Literal for v in typing.get_args(option))


def build(values: Values) -> tuple[TrainConfig, list[Misfit]]:
    """Validate values; one that does not fit is reported and left at its default, so that the rest can be judged."""
    misfits: list[Misfit] = []
    sections = {}
    for section, given in values.items():
        sections[section], found = build_section(section, given)
        misfits += found
    return TrainConfig.model_validate(sections), misfits


def build_section(section: str, given: dict[str, Any]) -> tuple[Section, list[Misfit]]:
    """Validate one section, as build does."""
    cls = section_class(section)
    try:
        return cls(**given), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    misfits = [misfit_of(section, detail) for detail in details]
    bad = {str(detail["loc"][0]) for detail in details}
    return cls(**{k: v for k, v in given.items() if k not in bad}), list(dict.fromkeys(misfits))


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
        case "greater_than_equal":
            return f"must be at least {show(ctx['ge'])}, got {got}", ""
        case "greater_than":
            return f"must be above {show(ctx['gt'])}, got {got}", ""
        case "less_than_equal":
            return f"must be at most {show(ctx['le'])}, got {got}", ""
        case "less_than":
            return f"must be below {show(ctx['lt'])}, got {got}", ""
        case "literal_error":
            choices = _choices(owner.model_fields[field].annotation)
            words = ", ".join(str(choice) for choice in choices)
            guess = did_you_mean(str(detail["input"]), [str(choice) for choice in choices])
            return f"must be one of {words}; got {got}", guess
        case "finite_number":
            return f"must be a finite number, got {got}", ""
        case kind:
            info = owner.model_fields.get(field)
            said = needed(info.annotation, kind) if info is not None else ""
            said = f"must be {said}" if said else f"{detail['msg'][:1].lower()}{detail['msg'][1:]}"
            return f"{said}, got {got}", ""


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
    for each in (annotation, *typing.get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return None


def _is_nested(cls: type[Section], field: str) -> bool:
    return field in cls.model_fields and _section_in(cls.model_fields[field].annotation) is not None


def show(value: Any) -> str:
    """Write a value into a message: short, and numbers as people write them."""
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        return str(int(value))
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
