"""Work that one process does for the others, with its errors raised on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from difftrain.contracts import DifftrainError, TrainingFault
from difftrain.distributed.ranks import Ranks

T = TypeVar("T")


def for_all(ranks: Ranks, worker: bool, action: Callable[[], T]) -> T:
    """Run an action where worker is true, while the others wait, and return the lowest such rank's result everywhere.

    The result is pickled between ranks: small. An error of any worker is raised on every rank, so that all leave with
    the same exit code and nobody waits for a rank that is gone.
    """
    result: T | None = None
    error: BaseException | None = None
    if worker:
        try:
            result = action()
        except Exception as caught:
            error = caught
    if ranks.size == 1:
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
    told = (
        error if error is None or isinstance(error, DifftrainError) else TrainingFault(f"rank {ranks.rank}: {error!r}")
    )
    answers = ranks.gather((worker, result, told))
    if error is not None:
        raise error
    for _, _, other in answers:
        if other is not None:
            raise other
    return next(answer for was_worker, answer, _ in answers if was_worker)  # type: ignore[return-value]
