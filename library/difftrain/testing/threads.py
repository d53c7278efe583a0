"""Ranks as threads of one process: for tests of what ranks say to each other, without the cost of processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
_TIMEOUT_S = 60.0


@dataclass
class _Meeting:
    size: int
    box: list[Any] = field(default_factory=list)
    others: dict[int, _Meeting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.box = [None] * self.size
        self.gate = threading.Barrier(self.size, timeout=_TIMEOUT_S)
        self.lock = threading.Lock()

    def other(self, number: int) -> _Meeting:
        """Return the n-th meeting of the same ranks beside this one."""
        with self.lock:
            return self.others.setdefault(number, _Meeting(self.size))


class ThreadRanks:
    """Behave as distributed.ranks.Ranks does; values are pickled, as they are between processes."""

    def __init__(self, meeting: _Meeting, rank: int, local_size: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, meeting.size
        self.local_rank, self.local_size = rank % local_size, local_size
        self._beside = 0

    @property
    def is_logger(self) -> bool:
        """Tell whether this is rank 0."""
        return self.rank == 0

    @property
    def leads_node(self) -> bool:
        """Tell whether this rank is the first of its machine."""
        return self.local_rank == 0

    def beside(self) -> ThreadRanks:
        """Return the same ranks as they meet in other threads."""
        self._beside += 1
        return ThreadRanks(self._meeting.other(self._beside), self.rank, self.local_size)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""
        self._meeting.box[self.rank] = pickle.dumps(value)
        self._meeting.gate.wait()
        values = [pickle.loads(content) for content in self._meeting.box]
        self._meeting.gate.wait()
        return values

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        """Return one rank's value."""
        return self.gather(value)[source]

    def agree(self, value: int) -> int:
        """Return the largest value."""
        return max(self.gather(int(value)))

    def any(self, flag: bool) -> bool:
        """Tell whether any rank said yes."""
        return bool(self.agree(bool(flag)))

    def barrier(self) -> None:
        """Wait for every rank."""
        self.agree(0)

    def abort(self) -> None:
        """Let waiting ranks fail at once."""
        self._meeting.gate.abort()


def on_threads(size: int, action: Callable[[ThreadRanks], T], local_size: int | None = None) -> list[T | Exception]:
    """Run an action on every rank; return each rank's result, or what it raised."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        ranks = ThreadRanks(meeting, rank, local_size or size)
        try:
            results[rank] = action(ranks)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
