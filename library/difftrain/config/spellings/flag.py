"""What one command line flag is, and how its text becomes a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["switch", "str", "int", "float", "number", "size", "strs", "ints", "floats", "pairs"]
Status = Literal["implemented", "nearest", "later", "refused"]

AS_OURS: Any = object()  # kohya's default is the default of the field


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table.

    to: "section.field" that it sets; empty where it sets nothing. help: its meaning; for flags that are not offered
    the reason and what to use instead. sets: what a switch writes. kohya: kohya's default where ours is another.
    same: values of a flag that is not built yet which ask for what is done anyway. weak: gives way to another flag of
    the same field. secret: the environment variable that its value moves to.
    """

    name: str
    kind: Kind
    to: str
    help: str
    status: Status = "implemented"
    sets: Any = True
    kohya: Any = AS_OURS
    choices: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    weak: bool = False
    secret: str = ""

    @property
    def option(self) -> str:
        """Return the flag as it is typed."""
        return f"--{self.name}"

    @property
    def takes_many(self) -> bool:
        """Say whether several values may follow."""
        return self.kind in ("strs", "ints", "floats", "pairs")


def on(name: str, kind: Kind, to: str, help: str, **rest: Any) -> Flag:
    """Make a row of a flag that does what kohya's does, or what its help says."""
    return Flag(name, kind, to, help, **rest)


def near(name: str, kind: Kind, to: str, help: str, **rest: Any) -> Flag:
    """Make a row of a flag that is accepted and means the nearest thing here, which is said once."""
    return Flag(name, kind, to, help, status="nearest", **rest)


def later(name: str, kind: Kind, why: str, **rest: Any) -> Flag:
    """Make a row of a flag that is known and not built yet: given, it is a fault, never ignored."""
    return Flag(name, kind, "", why, status="later", **rest)


def never(name: str, kind: Kind, why: str) -> Flag:
    """Make a row of a flag that is not offered, with its reason."""
    return Flag(name, kind, "", why, status="refused")


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
    if text.endswith("%") or value < 1:
        return value
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


def convert(flag: Flag, texts: list[str]) -> Any:
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
