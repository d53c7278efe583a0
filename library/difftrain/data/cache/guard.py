"""Decoding ahead for an encoder where a picture may hang or crash its decoder: only that picture is lost.

Loader workers decode without a guard, which costs nothing. Where one of them dies, or nothing comes from them for a
long time, the pictures of the batches in hand are decoded one by one in a process that is watched; what ends it, or
takes too long, is passed over, and all else goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from difftrain.data.cache.decoding import Decoding, Piece
from difftrain.data.loader import WorkerDied, WorkersSilent, data_loader, items_of
from difftrain.data.pool import Beat, Job, run_jobs

log = logging.getLogger("difftrain")
LIMIT_S = 60.0  # for a picture, as when data are indexed
PATIENCE_S = 150.0  # for the next batch
_TRIES = 3  # of batches that are late though none of their pictures is slow
_HANDLER = f"{__name__}:decode_each"


class HandedOut(Iterable[int]):
    """Ask for one batch after another, as they are wanted: no rank waits while another still has a share of its own."""

    def __init__(self, todo: np.ndarray, following: Callable[[], int], stop: threading.Event) -> None:
        self._todo, self._following, self._stop = todo, following, stop
        self._again: list[int] = []
        self._out: dict[int, None] = {}  # handed out, and not back yet

    def __iter__(self) -> Iterator[int]:
        while not self._stop.is_set():
            if self._again:
                number = self._again.pop(0)
            elif (place := self._following()) < len(self._todo):
                number = int(self._todo[place])
            else:
                return
            self._out[number] = None
            yield number

    def received(self, number: int) -> None:
        """Note that a batch is made ready."""
        self._out.pop(number, None)

    def take_back(self) -> list[int]:
        """Return what is out, which is handed out once more."""
        self._again = [*self._out, *self._again]
        self._out = {}
        return list(self._again)


def pieces_of(decoding: Decoding, handed: HandedOut, workers: int) -> Iterator[Piece]:
    """Make ready what is handed out, in loader workers.

    Raises: TrainingFault where workers keep dying, or stay silent, though every picture can be decoded in time.
    """
    tries = 0
    while True:
        loader = data_loader(decoding, handed, workers, decoding.forks, watched=True)
        try:
            for piece in items_of(loader, PATIENCE_S):
                tries = 0
                handed.received(piece.number)
                yield piece
            return
        except (WorkerDied, WorkersSilent) as lost:
            bad = _bad_of(decoding, handed.take_back())
            tries += 1
            if not bad and (isinstance(lost, WorkerDied) or tries >= _TRIES):
                raise
            decoding.pass_over(bad)
            what = str(lost).partition(". ")[0]
            log.warning("%s; %d picture%s named as too slow or crashed, all else goes on", what, len(bad), _s(len(bad)))


def _s(count: int) -> str:
    return "s are" if count != 1 else " is"


def _bad_of(decoding: Decoding, batches: Sequence[int]) -> dict[int, str]:
    """Decode the pictures of some batches one by one, watched: record id -> why it cannot be decoded."""
    job = Job((decoding, decoding.pictures_of(batches)))
    rows = run_jobs([job], _HANDLER, workers=1, limit_s=LIMIT_S)
    return {record: reason for some in rows for record, reason in some if reason}


def decode_each(job: Job, beat: Beat) -> Iterator[tuple[int, Any]]:
    """Decode the pictures of a job, from job.start on (a handler of pool.run_jobs)."""
    decoding, records = job.payload
    for position, record in enumerate(records):
        if position < job.start:
            continue
        if position not in job.bad:
            with beat.item(position):
                decoding.try_picture(record)
        yield position, (record, job.bad.get(position))
