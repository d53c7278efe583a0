"""What one key of train.py's TOML is, and whether a value is of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from difftrain.config.validate import show

Kind = Literal["field", "bool", "int", "number", "str", "any"]
Status = Literal["offered", "nearest", "later"]

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "str": ((str,), "text in quotes"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table.

    tables: where it may stand, its home first; "" is the top level of the file. to: "section.field" that it sets, or
    "?name" of something that is settled when all is read. kind: "field" is whatever the field takes. words: a value as
    it is spelt here -> the field's. passes: values that ask for what is done anyway, so that nothing is said.
    secret: the environment variable that its value moves to. help: its meaning, or why it is not offered.
    """

    name: str
    tables: tuple[str, ...]
    to: str
    help: str
    kind: Kind = "field"
    status: Status = "offered"
    words: Mapping[Any, Any] = field(default_factory=dict)
    passes: tuple[Any, ...] = ()
    secret: str = ""

    @property
    def home(self) -> str:
        """Return the table in which we write it."""
        return next((table for table in self.tables if table), "")

    @property
    def option(self) -> str:
        """Return how the command line spells it."""
        return f"--{self.home}.{self.name}" if self.home else f"--{self.name}"

    @property
    def place(self) -> str:
        """Return how a file spells it."""
        return f"[{self.home}] {self.name}" if self.home else self.name


def misfit(key: Key, value: Any) -> str:
    """Say what is wrong with a value's type, or nothing; a field's own type is judged with the field."""
    if key.kind in ("field", "any"):
        return ""
    types, needed = _KINDS[key.kind]
    if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
        return ""
    return f"must be {needed}, got {show(value)}"
