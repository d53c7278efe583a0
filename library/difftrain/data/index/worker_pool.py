"""Worker processes for input that may hang or crash a decoder: each item has a time limit, and only it is lost.

A decoder stuck in C can't be interrupted from within its process, so the parent watches a heartbeat and ends the process;
the rest of its job goes on in a fresh one, with the bad item marked.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from difftrain.contracts import DataFault

_ROWS_A_MESSAGE = 256
_SECONDS_A_MESSAGE = 0.5
_PR_SET_PDEATHSIG = 1
_DEATHS_OUTSIDE_ITEMS = 2  # of one job, before we give up on it

_MAIN = "import sys; from difftrain.data.index.worker_pool import serve; serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"

TOO_SLOW = "too slow: reading and decoding took longer than {limit:g} s"
DIED = "crashed: the process that decoded it ended with {how}"


class Heartbeat:
    """What a worker tells about where it is: the position of the item in hand, and since when. Shared memory."""

    def __init__(self, descriptor: int) -> None:
        self._values = memoryview(mmap.mmap(descriptor, 16)).cast("d")

    @contextlib.contextmanager
    def item(self, position: int) -> Iterator[None]:
        """Mark the decoding of one item: only what happens in here has a time limit."""
        self._values[0] = position
        self._values[1] = time.monotonic()
        try:
            yield
        finally:
            self._values[1] = 0.0

    @property
    def position(self) -> int:
        """Return the item in hand, or the last one."""
        return int(self._values[0])

    @property
    def age_s(self) -> float:
        """Return how long the item has been in hand; 0 where none is."""
        since = self._values[1]
        return time.monotonic() - since if since else 0.0

    def clear(self) -> None:
        """Forget the item."""
        self._values[1] = 0.0


@dataclass
class PoolJob:
    """A piece of work whose items are numbered from 0, always in the same order."""

    payload: Any
    start: int = 0  # items below are done
    bad: dict[int, str] = field(default_factory=dict)  # items that ended a process -> reason
    deaths: int = 0


# (job, beat) -> (position, row) for every item from job.start on; for job.bad it must yield without touching the item
Handler = Callable[[PoolJob, Heartbeat], Iterator[tuple[int, Any]]]


class _PoolWorker:
    """A process of its own interpreter: it carries nothing of the parent's (locks, SQLite, an unguarded script)."""

    def __init__(self, handler: str) -> None:
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as shared, theirs:
            shared.write(bytes(16))
            shared.flush()
            self.beat = Heartbeat(shared.fileno())
            passed = (theirs.fileno(), shared.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, *map(str, passed), handler],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle; without the parent they end by themselves
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            )
        self.connection = Connection(ours.detach())
        self.job: PoolJob | None = None

    def give(self, job: PoolJob) -> None:
        self.job = job
        self.beat.clear()
        with contextlib.suppress(OSError):  # its death is noticed where results are awaited
            self.connection.send(job)

    def end(self) -> str:
        """End the process and say how it ended."""
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        self.connection.close()
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else str(-code)
        return f"{name} (out of memory?)" if name == "SIGKILL" else name


def run_jobs(jobs: Iterable[PoolJob], handler: str, *, workers: int, limit_s: float) -> Iterator[list[Any]]:
    """Run jobs on worker processes and iterate over rows in the order they come in.

    handler: "module:function" of a Handler. Raises: DataFault that a handler raised; RuntimeError for its other exceptions.
    """
    waiting = iter(jobs)
    again: list[PoolJob] = []
    crew: list[_PoolWorker] = []

    def next_job() -> PoolJob | None:
        return again.pop() if again else next(waiting, None)

    try:
        while True:
            # a worker without a job gets the next one, or ends where none is left
            crew = [worker for worker in crew if worker.job is not None or _assign(worker, next_job())]
            # in place of those that died or were stopped, too
            while len(crew) < workers and (job := next_job()) is not None:
                crew.append(_PoolWorker(handler))
                crew[-1].give(job)
            if not crew:
                return
            # looks up now and then: a worker over its limit sends nothing
            ready = wait([worker.connection for worker in crew], timeout=min(1.0, limit_s / 4))
            for worker in list(crew):
                if worker.connection in ready:
                    try:
                        kind, value = worker.connection.recv()
                    # it died, as decoders do of a broken file: the rest of its job goes to another
                    except (EOFError, OSError):
                        again.append(_after_death(worker))
                        crew.remove(worker)
                        continue
                    yield from _received(worker, kind, value)
                elif worker.beat.age_s > limit_s:
                    again.append(_after_limit(worker, limit_s))
                    crew.remove(worker)
    finally:
        for worker in crew:
            worker.end()


def _assign(worker: _PoolWorker, job: PoolJob | None) -> bool:
    if job is None:
        worker.end()
        return False
    worker.give(job)
    return True


def _received(worker: _PoolWorker, kind: str, value: Any) -> Iterator[list[Any]]:
    assert worker.job is not None
    if kind == "rows":
        worker.job.start, rows = value
        yield rows
    elif kind == "done":
        worker.job = None
    elif kind == "fault":
        raise DataFault(value)
    else:
        raise RuntimeError(f"a worker of the index failed:\n{value}")


def _after_limit(worker: _PoolWorker, limit_s: float) -> PoolJob:
    """End a worker that takes too long and return its job, the item marked."""
    job, position = worker.job, worker.beat.position
    assert job is not None
    worker.end()
    if worker.beat.position == position and worker.beat.age_s > limit_s:  # else it had just gone on
        job.bad[position] = TOO_SLOW.format(limit=limit_s)
    return job


def _after_death(worker: _PoolWorker) -> PoolJob:
    """Return the job of a worker that died, its item marked; give up where it keeps dying between items."""
    job, on_item, position = worker.job, worker.beat.age_s > 0, worker.beat.position
    assert job is not None
    how = worker.end()
    if on_item:
        job.bad[position] = DIED.format(how=how)
        return job
    job.deaths += 1
    if job.deaths >= _DEATHS_OUTSIDE_ITEMS:
        raise RuntimeError(f"the processes that read the data for the index keep dying ({how})")
    return job


def serve(socket_fd: int, beat_fd: int, handler_name: str) -> None:
    """Work on jobs until the parent closes the connection (the main function of a worker)."""
    _end_with_parent()
    warnings.simplefilter("ignore")  # of damaged metadata and large pictures: what matters becomes a reason
    module, _, attribute = handler_name.partition(":")
    handler: Handler = getattr(importlib.import_module(module), attribute)
    connection, beat = Connection(socket_fd), Heartbeat(beat_fd)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            job = connection.recv()
            try:
                _work(connection, job, beat, handler)
                connection.send(("done", None))
            except DataFault as fault:
                connection.send(("fault", str(fault)))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except Exception:
                connection.send(("error", traceback.format_exc()))


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent: one stuck in a file or a decoder sees no closed connection."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent or parent == 1:  # it died before the kernel knew
        os._exit(1)


def _work(connection: Connection, job: PoolJob, beat: Heartbeat, handler: Handler) -> None:
    rows: list[Any] = []
    sent = time.monotonic()
    done = job.start - 1
    for position, row in handler(job, beat):
        # an item may have several rows, which go together: what is sent is not made again
        late = len(rows) >= _ROWS_A_MESSAGE or time.monotonic() - sent > _SECONDS_A_MESSAGE
        if rows and late and position != done:
            connection.send(("rows", (done + 1, rows)))
            rows, sent = [], time.monotonic()
        rows.append(row)
        done = position
    if rows:
        connection.send(("rows", (done + 1, rows)))
