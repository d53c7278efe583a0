"""Heartbeats of the ranks: whoever waits in vain can name the rank that is silent.

Each rank writes a number into the job's store once a second, from a thread of its own, and whether it waits for the
others now. A process that is stopped, killed or cut off writes no more. The texts of gloo, NCCL and HCCL name
addresses at best, and none says whether the other side is slow, stopped or gone.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BEAT_S = 1.0
RANKS_A_BEAT = 200  # the store serves some hundred heartbeats a second without notice
SILENT_BEATS = 3.5  # as many without a sign: nobody lives there
NOTICE_S = 30.0  # a rank that is silent for as long is named at once, before any time-out
LEFT, FAILED = "left", "failed"  # last heartbeats: ended because of others; ended with an error of its own
MOST_NAMED = 8
log = logging.getLogger("difftrain")


@dataclass(frozen=True)
class Roll:
    """Which ranks are missing. answered: the store could be asked."""

    failed: tuple[int, ...] = ()  # ended with an error of their own
    silent: tuple[int, ...] = ()  # no sign of life
    late: tuple[int, ...] = ()  # alive, and not waiting as the asker does
    answered: bool = True


class Heartbeats:
    """Give this rank's heartbeats, and read those of the others. store: a connection of its own, used by one thread alone."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._interval = BEAT_S * max(1.0, size / RANKS_A_BEAT)
        self._beats = 0
        self._waiting = 0  # how many of this process's threads wait for the others
        self._asked, self._answered, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._last = ""  # what to write last
        self._roll = Roll(answered=False)
        self._seen = ("", time.monotonic(), False)  # the neighbour's last sign, since when, whether it was named
        self._give()  # every rank has given one before any can miss it
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say, inside, that this rank has arrived where the others are awaited."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def roll(self) -> Roll:
        """Find out who is missing; takes some seconds, unless a rank has said that it fails."""
        self._asked.set()
        self._wake.set()
        if not self._answered.wait(2 * SILENT_BEATS * self._interval + 5.0):
            return Roll(answered=False)  # who keeps the store is silent
        return self._roll

    def end(self, last: str = "") -> None:
        """Give no more heartbeats. last: LEFT or FAILED, for those who will miss this rank."""
        if self._ended.is_set():
            return
        self._last = last
        self._ended.set()
        self._wake.set()
        self._thread.join(2.0)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._wake.wait(self._interval)
                self._wake.clear()
                self._give()
                if self._asked.is_set() and not self._answered.is_set():
                    self._roll = self._called()
                    self._answered.set()
                self._watch_neighbour()
            if self._last:
                self._store.set(str(self._rank), self._last)
        except Exception as error:  # the store went with its process: the collectives fail too, and ask
            log.debug("heartbeats end: %s", error)
            self._answered.set()

    def _give(self) -> None:
        self._beats += 1
        self._store.set(str(self._rank), f"{self._beats} {int(self._waiting > 0)}")

    def _called(self) -> Roll:
        """Compare two readings. Heartbeats go on between them: others may be asking too."""
        first = self._read(range(self._size))
        failed = tuple(rank for rank, sign in enumerate(first) if sign == FAILED)
        if failed:
            return Roll(failed=failed)
        end = time.monotonic() + SILENT_BEATS * self._interval
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(self._interval, left))
            self._give()
        second = self._read(range(self._size))
        failed = tuple(rank for rank, sign in enumerate(second) if sign == FAILED)
        alive = [rank for rank, sign in enumerate(second) if sign not in (LEFT, FAILED) and rank != self._rank]
        silent = tuple(rank for rank in alive if first[rank] == second[rank])
        late = tuple(rank for rank in alive if rank not in silent and second[rank].endswith(" 0"))
        return Roll(failed, silent, late if self._waiting else ())

    def _read(self, ranks: Sequence[int]) -> list[str]:
        return [sign.decode() for sign in self._store.multi_get([str(rank) for rank in ranks])]

    def _watch_neighbour(self) -> None:
        """Name the rank before this one where it falls silent: on accelerators the time-out ends in a library's text."""
        neighbour = (self._rank - 1) % self._size
        (sign,) = self._read([neighbour])
        last, since, named = self._seen
        if sign != last:
            self._seen = (sign, time.monotonic(), False)
        elif sign not in (LEFT, FAILED) and not named and time.monotonic() - since > NOTICE_S:
            self._seen = (last, since, True)
            text = f"rank {self._rank}: {silence((neighbour,), self._size)} for {NOTICE_S:g} s"
            print(text, file=sys.stderr, flush=True)


def silence(ranks: Sequence[int], size: int) -> str:
    """Say that ranks are silent."""
    return f"{named(ranks, size)} given no sign of life"


def named(ranks: Sequence[int], size: int, verb: tuple[str, str] = ("has", "have")) -> str:
    """Name ranks, some of them where there are many, with their verb."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {size} {verb[0]}"
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"ranks {shown}{more} of {size} {verb[1]}"


def sentence(roll: Roll, size: int, limit: str, where: str) -> str:
    """Say who is missing. limit: how long ranks wait, where: the store's address."""
    if not roll.answered:
        return f"the process that keeps the ranks' store at {where} does not answer: it has ended or was stopped"
    if roll.failed:
        return f"{named(roll.failed, size)} ended with an error; its own message says why"
    if roll.silent:
        return f"{silence(roll.silent, size)}: it was stopped or killed, or its machine cannot be reached"
    if roll.late:
        return f"{named(roll.late, size, ('is', 'are'))} alive, but did not arrive within {limit}"
    return "the connection to another rank broke, though every rank that is left is alive: look at the network"
