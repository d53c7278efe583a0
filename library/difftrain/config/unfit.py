"""Values of which nothing can be made, whatever they are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MOST = 2**63 - 1


def unfit(value: Any) -> str:
    """Say why nothing can be done with a value; nothing of most."""
    for each in _leaves(value):
        if not isinstance(each, str | bool | int | float | None):
            return "must not be a date or a time"
        if isinstance(each, str) and ("\0" in each or any("\ud800" <= letter <= "\udfff" for letter in each)):
            return f"holds what is no text: {each!r}"
        if isinstance(each, int) and abs(each) > _MOST:
            return f"is beyond the whole numbers of TOML, {_MOST} at most"
    return ""


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
