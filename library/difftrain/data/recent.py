"""A small memory of what was made last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Recent:
    """Keep the last few values that were asked for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Return the value of a key, made where it is not kept."""
        value = self._kept.pop(key, None)
        if value is None:
            value = make()
            if len(self._kept) >= self._limit:
                self._kept.pop(next(iter(self._kept)))
        self._kept[key] = value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, (self._limit,)
