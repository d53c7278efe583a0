"""Weights that all ranks put together and one writes: whatever stops the one that writes, the others are not left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Weights = Iterator[tuple[str, "Tensor"]]


@contextmanager
def to_the_end(weights: Weights) -> Iterator[Weights]:
    """Give a stream to its reader, and read what that leaves, also where it fails: each weight takes all ranks."""
    try:
        yield weights
    finally:
        for _ in weights:
            pass


def all_tried(jobs: Iterable[Callable[[], None]]) -> None:
    """Do every job, also after one that failed, as other ranks take part in each; then raise the first error."""
    first: Exception | None = None
    for job in jobs:
        try:
            job()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
