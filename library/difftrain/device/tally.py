"""Count which path calls took, fused or plain, for tests and reports."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

_open: Counter[str] | None = None


def count(kind: str) -> None:
    """Count one call, where somebody counts."""
    if _open is not None:
        _open[kind] += 1


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count calls while the context is open.

    Keys: "fused" and "sdpa" of attention; "geglu fused", "geglu plain" and so on of the other kernels.
    """
    global _open
    before, _open = _open, Counter()
    try:
        yield _open
    finally:
        _open = before
