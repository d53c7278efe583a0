"""Names of a model's tensors in its original layout: rows of a table that is read both ways.

A row is a line "ours [+ ours ...] = theirs [halves] [leaf=NAME]": modules or tensors, "{}" the number of a block. Several
of ours on one of theirs lie there one behind another on dim 0. halves: the two halves of dim 0 are swapped (scale before
shift). leaf: what is called weight here is called NAME there. A row of modules stands for their weights and biases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KeyRow:
    """One row of a table."""

    ours: tuple[str, ...]
    theirs: str
    halves: bool = False
    leaf: str = "weight"


@cache
def rows(table: str) -> tuple[KeyRow, ...]:
    """Read a table, a row a line."""
    parsed = []
    for line in filter(None, map(str.strip, table.splitlines())):
        left, _, right = line.partition(" = ")
        theirs, *marks = right.split()
        leaf = next((mark.removeprefix("leaf=") for mark in marks if mark.startswith("leaf=")), "weight")
        parsed.append(KeyRow(tuple(left.split(" + ")), theirs, "halves" in marks, leaf))
    return tuple(parsed)


class KeyPiece(NamedTuple):
    """Where a tensor of ours lies: rows of the tensor `key` from `start`.

    form: "same"; "conv": (C, D) as (C, D, 1, 1); "transposed". halves: see the table.
    """

    key: str
    start: int = 0
    halves: bool = False
    form: str = "same"


Rule = Callable[[str], KeyPiece]  # our name -> where it lies


def table_rule(table: str, shapes: Shapes) -> Rule:
    """Return the rule that a table is, for tensors of these shapes. The rule raises KeyError for what no row names."""
    places = {name: (row, place) for row in rows(table) for place, name in enumerate(row.ours)}

    def rule(name: str) -> KeyPiece:
        owner, _, leaf = name.rpartition(".")
        for whole, ending in ((name, ""), (owner, leaf)):
            for pattern, number in _patterns(whole):
                if pattern in places:
                    row, place = places[pattern]
                    theirs = row.theirs.replace("{}", number)
                    key = f"{theirs}.{row.leaf if ending == 'weight' else ending}" if ending else theirs
                    before = (each.replace("{}", number) for each in row.ours[:place])
                    start = sum(shapes[f"{each}.{ending}" if ending else each][0] for each in before)
                    return KeyPiece(key, start, row.halves)
        raise KeyError(f"no row of the table names {name}")

    return rule


def _patterns(name: str) -> list[tuple[str, str]]:
    """Return a name with the number of its block as {}, and as it is, each with that number."""
    first = re.search(r"\.(\d+)(?=\.|$)", name)
    plain = [(name, "")]
    return [(f"{name[: first.start()]}.{{}}{name[first.end() :]}", first[1]), *plain] if first else plain


class KeyMap:
    """Where all tensors of one model lie. pieces: our name -> place. stored: their key -> its whole shape."""

    def __init__(self, shapes: Shapes, rule: Rule) -> None:
        self.shapes = dict(shapes)
        self.pieces = {name: rule(name) for name in shapes}
        self.stored: dict[str, tuple[int, ...]] = {}
        self.members: dict[str, list[str]] = {}  # their key -> ours in it, in order
        for name, piece in self.pieces.items():
            shape = _stored_shape(piece, shapes[name])
            before = self.stored.get(piece.key, (0,))
            self.stored[piece.key] = (max(before[0], piece.start + shape[0]), *shape[1:]) if shape else shape
            self.members.setdefault(piece.key, []).append(name)
        for names in self.members.values():
            names.sort(key=lambda name: self.pieces[name].start)

    def restored(self, name: str, whole: Tensor) -> Tensor:
        """Take a tensor of ours out of theirs."""
        piece, shape = self.pieces[name], self.shapes[name]
        value = whole
        if len(self.members[piece.key]) > 1:
            value = whole[piece.start : piece.start + _stored_shape(piece, shape)[0]]
        if piece.form == "conv":
            value = value.reshape(shape)
        return _swapped(value.T if piece.form == "transposed" else value, piece.halves)

    def collected(self, name: str, value: Tensor, waiting: dict[str, Tensor]) -> Tensor | None:
        """Take a tensor of ours; return theirs once all that it holds have come, which wait until then."""
        key = self.pieces[name].key
        members = self.members[key]
        if len(members) == 1:
            return self.joined(key, {name: value})
        waiting[name] = value.detach().to("cpu", copy=True)  # whoever gives it may write over it
        if any(each not in waiting for each in members):
            return None
        return self.joined(key, {each: waiting.pop(each) for each in members})

    def joined(self, key: str, ours: Mapping[str, Tensor]) -> Tensor:
        """Make a tensor of theirs of all of ours that it holds, by our names."""
        import torch

        values = [self._stored(name, ours[name]) for name in self.members[key]]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _stored(self, name: str, value: Tensor) -> Tensor:
        piece = self.pieces[name]
        value = _swapped(value, piece.halves)
        if piece.form == "conv":
            return value[:, :, None, None]
        return value.T.contiguous() if piece.form == "transposed" else value


def _stored_shape(piece: KeyPiece, shape: tuple[int, ...]) -> tuple[int, ...]:
    if piece.form == "conv":
        return (*shape, 1, 1)
    return shape[::-1] if piece.form == "transposed" else shape


def _swapped(value: Tensor, halves: bool) -> Tensor:
    import torch

    return torch.cat(value.chunk(2)[::-1]) if halves else value


def renamed(name: str, table: Mapping[str, str]) -> str:
    """Rename the beginning of a name by a table. Raises KeyError where no row fits."""
    for ours, theirs in table.items():
        if name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
    raise KeyError(name)
