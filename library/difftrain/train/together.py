"""Work that one process does for the others: they wait for as long as it takes, and its errors are raised on all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from difftrain.contracts import DifftrainError, TrainingFault
from difftrain.distributed.ranks import Ranks

T = TypeVar("T")
SIGN_OF_LIFE_S = 1.0


@contextmanager
def company(ranks: Ranks, worker: bool) -> Iterator[None]:
    """Do long work on some ranks, inside, while the others wait, without a limit on how long.

    A collective waits for a rank only until the time-out of the group, which is there to notice lost ranks. So a
    thread of the worker gives a sign of life each second, and only a worker that falls silent is taken for lost. Every
    rank enters; inside, nobody uses the control group.
    """
    if ranks.size == 1:
        yield
        return
    if not worker:
        yield
        while ranks.agree(0):
            pass
        return
    done = threading.Event()
    lost: list[Exception] = []

    def tell() -> None:
        try:
            while ranks.agree(int(not done.wait(SIGN_OF_LIFE_S))):
                pass
        except Exception as error:  # raised where the work ends
            lost.append(error)

    signs = threading.Thread(target=tell, name="sign of life", daemon=True)
    signs.start()
    try:
        yield
    finally:
        done.set()
        signs.join()
    if lost:
        raise lost[0]


def for_all(ranks: Ranks, worker: bool, action: Callable[[], T]) -> T:
    """Run an action where worker is true, while the others wait, and return the lowest such rank's result everywhere.

    The result is pickled between ranks: small. An error of any worker is raised on every rank, so that all leave with
    the same exit code and nobody waits for a rank that is gone.
    """
    result: T | None = None
    error: BaseException | None = None
    with company(ranks, worker):
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
