"""Weights in captions as prompts write them, `a (red:1.3) [small] star`: from text to pieces, from weights to states."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_UP, _DOWN = 1.1, 1 / 1.1  # of (a) and [a]
_PIECE = re.compile(r"\\(?P<kept>[()\[\]\\]?)|:(?P<weight>[+-]?[.\d]+)\)|(?P<bracket>[()\[\]])|[^\\()\[\]:]+|:")


def weighted_pieces(text: str) -> list[tuple[str, float]]:
    """Cut a text into pieces with their weights; neighbours of one weight are one piece.

    (a) weighs 1.1, (a:1.3) what it says, [a] 1 / 1.1; brackets multiply. A backslash keeps the bracket behind it and
    goes itself. A bracket that is never closed reaches to the end; one that was never opened is text.
    """
    pieces: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    # one pass: an opening bracket is remembered, a closing one weighs all that came since
    for found in _PIECE.finditer(text):
        bracket, weight = found["bracket"], _number(found["weight"])
        if found["kept"] is not None:
            pieces.append((found["kept"], 1.0))
        elif bracket and bracket in opened:
            opened[bracket].append(len(pieces))
        elif weight is not None and opened["("]:
            _multiply(pieces, opened["("].pop(), weight)
        elif bracket == ")" and opened["("]:
            _multiply(pieces, opened["("].pop(), _UP)
        elif bracket == "]" and opened["["]:
            _multiply(pieces, opened["["].pop(), _DOWN)
        else:
            pieces.append((found[0], 1.0))

    # brackets that were never closed
    for bracket, factor in (("(", _UP), ("[", _DOWN)):
        for start in opened[bracket]:
            _multiply(pieces, start, factor)
    return _merged(pieces)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:  # "1.2.3": text like any other
        return None


def _multiply(pieces: list[tuple[str, float]], start: int, factor: float) -> None:
    pieces[start:] = [(text, weight * factor) for text, weight in pieces[start:]]


def _merged(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    merged: list[tuple[str, float]] = []
    for text, weight in pieces:
        if merged and merged[-1][1] == weight:
            merged[-1] = (merged[-1][0] + text, weight)
        else:
            merged.append((text, weight))
    return merged


def weigh(states: Tensor, weights: Tensor) -> Tensor:
    """Multiply the states of each token by its weight, then scale each text so that its mean stays what it was.

    Shapes: states (B, L, D), weights (B, L) -> (B, L, D) of the dtype of states; computed in fp32.
    Source: AUTOMATIC1111's emphasis, which kohya's scripts took over.
    """
    plain = states.float()
    weighed = plain * weights.float().unsqueeze(-1)
    before, after = (value.mean(dim=(-2, -1), keepdim=True) for value in (plain, weighed))
    scale = (before / after).where(after != 0, 1.0)
    return (weighed * scale).to(states.dtype)
