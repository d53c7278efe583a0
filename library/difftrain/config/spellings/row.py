"""One row of the tables of spellings: a flag, an option or a key, the field that it sets, and how its value is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from difftrain.config.schema.section import WHOLE_SHARE
from difftrain.config.schema.validate import show

Kind = Literal[
    "switch", "str", "int", "float", "number", "size", "strs", "ints", "floats", "pairs",  # words of a command line
    "bool", "field", "any",  # values of a file; "field": what the field takes
]  # fmt: skip
Status = Literal["offered", "nearest", "later", "refused"]

AS_OURS: Any = object()  # kohya's default is the default of the field


@dataclass(frozen=True, slots=True)
class Row:
    """One spelling of a setting.

    to: "section.field" that it sets, "?name" of something that is settled when all is read, or nothing. help: empty
    where it means what its field means (config/spellings/spelling.py), else its own meaning, or why it is not offered
    and what to use instead. status: offered; nearest: it means the nearest thing here, which is said once; later: known
    and not built yet, so that it is a fault where it is given; refused: not offered.
    """

    name: str
    kind: Kind
    to: str = ""
    help: str = ""
    status: Status = "offered"
    tables: tuple[str, ...] = ()  # of a file, where a key may stand, its home first; "" is the top of the file
    takes: str = ""  # what an option calls its value, [in brackets] where that may be left out
    sets: Any = True  # what a switch writes
    words: Mapping[Any, Any] = field(default_factory=dict)  # a value as it is spelt here -> the field's
    choices: tuple[str, ...] = ()  # of a row without a field, as its default is; of a switch: words that it may have
    default: Any = None
    passes: tuple[Any, ...] = ()  # values that ask for what is done anyway, so that nothing is said
    weak: bool = False  # gives way to another flag of the same field
    secret: str = ""  # the environment variable that its value moves to
    kohya: Any = AS_OURS  # kohya's default where ours is another

    @property
    def home(self) -> str:
        """Return the table in which we write a key."""
        return next((table for table in self.tables if table), "")

    @property
    def option(self) -> str:
        """Return how the command line spells it."""
        return f"--{self.home}.{self.name}" if self.home else f"--{self.name}"

    @property
    def toml_key(self) -> str:
        """Return how a file spells it."""
        return f"[{self.home}] {self.name}" if self.home else self.name

    @property
    def takes_many(self) -> bool:
        """Say whether several values may follow on a command line."""
        return self.kind in ("strs", "ints", "floats", "pairs")


# --- the words of a command line


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text!r}") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


def _number(text: str) -> float:
    """Read a count of steps, a share of all steps below 1, or a percentage, as kohya does."""
    value = _float(text[:-1]) / 100 if text.endswith("%") else _float(text)
    if text.endswith("%") and value > 1:
        raise ValueError(f"must be at most 100%, got {text!r}")
    if text.endswith("%") or value < 1:
        return min(value, WHOLE_SHARE)
    if value != int(value):
        raise ValueError(f"must be a whole number of steps, or a share below 1, got {text!r}")
    return int(value)


def _size(text: str) -> tuple[int, int]:
    numbers = text.split(",")
    if len(numbers) > 2 or not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(f"must be WIDTH,HEIGHT or one number for a square, got {text!r}")
    sides = [int(number) for number in numbers]
    return sides[0], sides[-1]


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, mark, value = (part.strip() for part in text.partition("="))
        if not (name and mark and value):
            raise ValueError(f"must be NAME=VALUE, got {text!r}")
        if pairs.setdefault(name, value) != value:
            raise ValueError(f"says two things of {name}: {pairs[name]} and {value}")
    return pairs


_ONE: dict[Kind, Callable[[str], Any]] = {"str": str, "int": _int, "float": _float, "number": _number, "size": _size}


def convert(flag: Row, texts: list[str]) -> Any:
    """Turn the words after a flag into its value.

    Raises: ValueError with a sentence that names the value.
    """
    if flag.kind == "switch":
        return flag.sets
    if flag.kind == "strs":
        return tuple(texts)
    if flag.kind == "ints":
        return tuple(_int(number) for text in texts for number in text.split(","))
    if flag.kind == "floats":
        return tuple(_float(number) for text in texts for number in text.split(","))
    if flag.kind == "pairs":
        return _pairs([pair for text in texts for pair in text.split(",")])
    if not texts[-1].strip() and flag.kind != "str":
        raise ValueError("its value is empty")
    return _ONE[flag.kind](texts[-1])


# --- the values of a file

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "str": ((str,), "text in quotes"),
}


def misfit(key: Row, value: Any) -> str:
    """Say what is wrong with a value's type, or nothing; a field's own type is judged with the field."""
    if key.kind in ("field", "any"):
        return ""
    types, needed = _TYPES[key.kind]
    if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
        return ""
    return f"must be {needed}, got {show(value)}"
