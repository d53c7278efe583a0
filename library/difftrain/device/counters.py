"""Count which path calls took, fused or plain, for tests and reports."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch

_open: Counter[str] | None = None


def count(kind: str) -> None:
    """Count one call, where somebody counts.

    What is compiled is not counted: a count inside a graph would compile it anew once counting ends.
    """
    if not torch.compiler.is_compiling() and _open is not None:
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
