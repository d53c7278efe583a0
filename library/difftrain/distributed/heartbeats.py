"""Heartbeats of the ranks: whoever waits in vain can name the rank that is silent, and where it was last.

Each rank writes into the job's store once a second, from a thread of its own: how long it lives, whether it waits for the
others now, and where its main thread is. A process that is stopped, killed or cut off writes no more. The texts of gloo,
NCCL and HCCL name addresses at best, and none says whether the other side is slow, stopped or gone.

A rank whose limit is up asks all to print their stacks. A rank that has left the job says so, and one that does not
follow within END_S, because it hangs, is ended by its own thread: nothing is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from difftrain.distributed import stacks

BEAT_S = 1.0
RANKS_A_BEAT = 200  # the store serves some hundred heartbeats a second without notice
SILENT_BEATS = 3.5  # as many without a sign: nobody lives there
NOTICE_S = 30.0  # a rank that is silent for as long is named at once, before any time-out
END_S = 30.0  # after a rank has left the job, others that have not ended by themselves are ended
LEAD_S = 10.0  # stacks are asked for so long before the limit: then an accelerator's library ends the process itself
LEFT, FAILED = "left", "failed"  # last heartbeats: ended because of others; ended with an error of its own
DUMP, OVER = "dump", "over"  # keys of the store: who asked for stacks, who has left the job
STEP = "step "  # what a rank is doing begins with it while a step is computed, which no rank does for long
MOST_NAMED = 8
log = logging.getLogger("difftrain")


@dataclass(frozen=True)
class Roll:
    """Which ranks are missing. answered: the store could be asked. last: where the silent and the late were, by rank."""

    failed: tuple[int, ...] = ()  # ended with an error of their own
    silent: tuple[int, ...] = ()  # no sign of life
    late: tuple[int, ...] = ()  # alive, and not waiting as the asker does
    answered: bool = True
    last: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sign:
    """A heartbeat that was read: how long the rank has lived, whether it waits for others, its pace, and where it is."""

    text: str
    seconds: float = 0.0
    is_waiting: bool = False
    pace: str = ""
    where: str = ""

    @classmethod
    def of(cls, text: str) -> Sign:
        """Read what `Heartbeats` wrote."""
        if text in (LEFT, FAILED):
            return cls(text)
        seconds, waiting, pace, where = text.split(" ", 3)
        return cls(text, float(seconds), waiting == "1", pace.strip("-"), where)

    @property
    def lives(self) -> bool:
        """Tell whether it is no last one."""
        return self.text not in (LEFT, FAILED)


class Heartbeats:
    """Give this rank's heartbeats, and read those of the others. store: a connection of its own, used by one thread alone.

    limit_s: how long ranks wait for one another. where: the store's host and port.
    """

    def __init__(
        self, store: Any, rank: int, size: int, limit_s: float = 1800.0, where: tuple[str, int] = ("", 0)
    ) -> None:
        self._store, self._rank, self._size, self._where = store, rank, size, where
        self._interval = BEAT_S * max(1.0, size / RANKS_A_BEAT)
        self._limit_s = limit_s
        self._asks_after_s = limit_s - min(LEAD_S, 0.1 * limit_s)
        self._born = time.monotonic()
        self._waiting = 0  # how many of this process's threads wait for the others
        self._since = self._born  # of what is done now, or since when this rank waits
        self._doing = "starting"
        self._asked, self._answered, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._asks_stacks = False
        self._error: BaseException | None = None
        self._wake = threading.Event()
        self._last = ""  # what to write last
        self._roll = Roll(answered=False)
        self._seen = ("", time.monotonic(), False)  # the neighbour's last sign, since when, whether it was named
        self._dumped, self._over_at = False, 0.0
        # what the others may know of this rank's own time: one word, as train/diagnosis/slow_ranks.py has it
        self.pace = ""
        self._comparing: tuple[Callable[[list[str]], None], float] | None = None
        self._compared_at = self._born
        if rank == 0:
            for key in (DUMP, OVER):
                self._store.set(key, "")
        self._give()  # every rank has given one before any can miss it
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say, inside, that this rank has arrived where the others are awaited."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._since = time.monotonic()

    def doing(self, what: str) -> None:
        """Say what this rank does from here on; `STEP` and its number while a step is computed."""
        self._doing, self._since = what, time.monotonic()

    def compare(self, look: Callable[[list[str]], None], every_s: float) -> None:
        """Let a function look at the pace of every rank from time to time, on this rank's thread."""
        self._comparing = (look, every_s)

    def roll(self, error: BaseException | None = None, *, stacks: bool = False) -> Roll:
        """Find out who is missing; takes some seconds, unless a rank has said that it fails.

        error: what ended the waiting. stacks: the time is up, so that every rank is to print where it is.
        """
        self._error, self._asks_stacks = error, stacks
        self._asked.set()
        self._wake.set()
        if not self._answered.wait(2 * SILENT_BEATS * self._interval + 5.0):
            if stacks:
                self._dump()
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
        _no_alarm()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._wake.wait(self._interval)
                self._wake.clear()
                self._give()
                if self._asked.is_set() and not self._answered.is_set():
                    if self._asks_stacks:
                        self._ask_for_stacks()
                    self._roll = self._called()
                    self._answered.set()
                self._look()
                self._compare()
            if self._last:
                self._store.set(str(self._rank), self._last)
                self._store.set(OVER, str(self._rank))
        except Exception as error:  # the store went with its process: the collectives fail too, and ask
            log.debug("heartbeats end: %s", error)
            self._answered.set()
            _no_alarm()
            self._follow_the_store()

    def _give(self) -> None:
        where = f"{self._doing}, {stacks.here()}".replace("\n", " ")
        lived = time.monotonic() - self._born
        self._store.set(str(self._rank), f"{lived:.2f} {int(self._waiting > 0)} {self.pace or '-'} {where}")
        # a thread of C prints where this process is, if it is held up so that not even this thread comes to run
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback_later(self._limit_s, file=sys.__stderr__ or 2)

    def _called(self) -> Roll:
        """Compare two readings. Heartbeats go on between them: others may be asking too."""
        first = self._read(range(self._size))
        failed = tuple(rank for rank, sign in enumerate(first) if sign.text == FAILED)
        if failed:
            return Roll(failed=failed)
        end = time.monotonic() + SILENT_BEATS * self._interval
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(self._interval, left))
            self._give()
        second = self._read(range(self._size))
        failed = tuple(rank for rank, sign in enumerate(second) if sign.text == FAILED)
        alive = [rank for rank, sign in enumerate(second) if sign.lives and rank != self._rank]
        silent = tuple(rank for rank in alive if first[rank] == second[rank])
        late = tuple(rank for rank in alive if rank not in silent and not second[rank].is_waiting)
        lived = time.monotonic() - self._born
        last = {rank: f"{max(0.0, lived - second[rank].seconds):.0f} s ago at {second[rank].where}" for rank in silent}
        last |= {rank: f"at {second[rank].where}" for rank in late}
        return Roll(failed, silent, late if self._waiting else (), last=last)

    def _read(self, ranks: Sequence[int]) -> list[Sign]:
        return [Sign.of(sign.decode()) for sign in self._store.multi_get([str(rank) for rank in ranks])]

    # --- what others say, once a beat

    def _look(self) -> None:
        neighbour = (self._rank - 1) % self._size
        sign, dump, over = (text.decode() for text in self._store.multi_get([str(neighbour), DUMP, OVER]))
        self._watch_neighbour(neighbour, Sign.of(sign))
        if dump:
            self._dump()
        elif self._is_stuck():
            self._ask_for_stacks()
        if over and over != str(self._rank):
            self._over_at = self._over_at or time.monotonic()
            if time.monotonic() - self._over_at > END_S and not self._ended.is_set():
                self._end_process(f"rank {over} has left the job {END_S:g} s ago, and this one did not end by itself")

    def _compare(self) -> None:
        if self._comparing is None or time.monotonic() - self._compared_at < self._comparing[1]:
            return
        self._compared_at = time.monotonic()
        signs = self._read(range(self._size))
        if all(sign.lives for sign in signs):
            self._comparing[0]([sign.pace for sign in signs])

    def _is_stuck(self) -> bool:
        """Tell whether a wait for others, or a step, has come close to the limit."""
        long = time.monotonic() - self._since > self._asks_after_s
        return long and not self._dumped and (self._waiting > 0 or self._doing.startswith(STEP))

    def _ask_for_stacks(self) -> None:
        if not self._dumped:
            self._store.set(DUMP, str(self._rank))
            self._dump()

    def _watch_neighbour(self, neighbour: int, sign: Sign) -> None:
        """Name the rank before this one where it falls silent: on accelerators the time-out ends in a library's text."""
        last, since, named = self._seen
        if sign.text != last:
            self._seen = (sign.text, time.monotonic(), False)
        elif sign.lives and not named and time.monotonic() - since > NOTICE_S:
            self._seen = (last, since, True)
            text = f"rank {self._rank}: {silence((neighbour,), self._size)} for {NOTICE_S:g} s; it was at {sign.where}"
            print(text, file=sys.stderr, flush=True)

    def _dump(self) -> None:
        """Print the stacks of this process, once."""
        if self._dumped:
            return
        self._dumped = True
        at = stacks.here(self._error)
        lasts = f"{time.monotonic() - self._since:.0f} s"
        what = (
            f"waits for the other ranks since {lasts}" if self._waiting else f"does not wait for another, since {lasts}"
        )
        stacks.dump(self._rank, f"rank {self._rank} of {self._size}, {self._doing}: {what}, at {at}", self._error)

    def _follow_the_store(self) -> None:
        """End with the process that kept the store, where this one does not end by itself: it waits for nobody any more."""
        host, port = self._where
        if self._ended.wait(END_S) or not host:
            return
        try:
            socket.create_connection((host, port), 5.0).close()
        except OSError:
            self._end_process(
                f"nothing keeps the ranks' store at {host}:{port} any more, and this one did not end by itself"
            )

    def _end_process(self, why: str) -> None:
        self._dump()
        stacks.say(f"rank {self._rank} of {self._size}: {why}: it hangs, and ends now")
        os._exit(1)


def _no_alarm() -> None:
    with contextlib.suppress(Exception):
        faulthandler.cancel_dump_traceback_later()


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
        what = f"{silence(roll.silent, size)}: it was stopped or killed, or its machine cannot be reached"
        return what + _last(roll, roll.silent, "last seen ")
    if roll.late:
        return f"{named(roll.late, size, ('is', 'are'))} alive, but did not arrive within {limit}" + _last(
            roll, roll.late
        )
    return "the connection to another rank broke, though every rank that is left is alive: look at the network"


def _last(roll: Roll, ranks: Sequence[int], word: str = "") -> str:
    """Say where ranks are, or were when they last said so."""
    known = [(rank, roll.last[rank]) for rank in ranks if rank in roll.last][:MOST_NAMED]
    if len(ranks) == 1 and known:
        return f" ({word}{known[0][1]})"
    return f" ({'; '.join(f'rank {rank} {word}{where}' for rank, where in known)})" if known else ""
