"""Work that one process does for the others: they wait for as long as it takes, and its errors are raised on all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from difftrain.contracts import DifftrainError, TrainingFault
from difftrain.distributed.ranks import Ranks

T = TypeVar("T")
SIGN_OF_LIFE_S = 1.0


@dataclass(frozen=True)
class Events:
    """What ranks hear of one another while they work. failed: this one has. stop: any has, so that going on is in vain."""

    failed: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


@contextmanager
def heartbeat(ranks: Ranks, worker: bool, events: Events | None = None) -> Iterator[None]:
    """Do long work on some ranks, inside, while the others wait, without a limit on how long.

    A collective waits for a rank only until the time-out of the group, which is there to notice lost ranks. So a
    thread of the worker gives a sign of life each second, and only a worker that falls silent is taken for lost. Every
    rank enters; inside, nobody uses the control group. news: set from the others' signs, for work that can be left.
    """
    events = events or Events()
    if ranks.size == 1:
        yield
        return
    # --- who waits: answers each sign of life until no worker is left
    if not worker:
        yield
        while _exchange(ranks, False, events):
            pass
        return
    # --- who works: a thread gives the signs, since the work itself may hold this one for minutes
    done = threading.Event()
    lost: list[Exception] = []

    def beat() -> None:
        try:
            while _exchange(ranks, not done.wait(SIGN_OF_LIFE_S), events):
                pass
        except Exception as error:  # raised where the work ends
            lost.append(error)
            events.stop.set()

    signs = threading.Thread(target=beat, name="sign of life", daemon=True)
    signs.start()
    try:
        yield
    finally:
        done.set()
        signs.join()
    if lost:
        raise lost[0]


def _exchange(ranks: Ranks, working: bool, events: Events) -> bool:
    """Give a sign and take the others'; return whether anybody is still at work."""
    going = ranks.any(working)
    if ranks.any(events.failed.is_set()):
        events.stop.set()
    return going


def on_each_machine(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run an action in one process a machine, as run_on does, and return to every rank what came of it on its own machine."""
    made: list[T] = []
    run_on(ranks, ranks.leads_node, lambda: made.append(action()))
    return ranks.gather(made[0] if made else None)[ranks.rank - ranks.local_rank]


def run_on(ranks: Ranks, worker: bool, action: Callable[[], T], events: Events | None = None) -> T:
    """Run an action where worker is true, while the others wait, and return the lowest such rank's result everywhere.

    The result is pickled between ranks: small. An error of any worker is raised on every rank, so that all leave with
    the same exit code and nobody waits for a rank that is gone.
    """
    events = events or Events()
    result: T | None = None
    error: BaseException | None = None
    with heartbeat(ranks, worker, events):
        if worker:
            try:
                result = action()
            except Exception as caught:
                error = caught
                events.failed.set()
    if ranks.size == 1:
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    # every rank hears of every worker; an error that others may not be able to unpickle goes as text
    known = error is None or isinstance(error, DifftrainError)
    answers = ranks.gather((worker, result, error if known else TrainingFault(f"rank {ranks.rank}: {error!r}")))
    if error is not None:
        raise error
    for _, _, answer in answers:
        if answer is not None:
            raise answer
    return next(answer for was_worker, answer, _ in answers if was_worker)  # type: ignore[return-value]
