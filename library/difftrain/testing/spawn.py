"""Start the ranks of a small gloo job as processes of their own, as a launcher would, and see how each ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import difftrain

_LIBRARY = Path(difftrain.__file__).resolve().parents[1]
_CALL = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__rank__')[sys.argv.pop(1)](*sys.argv[1:])"
_GRACE_S = 5.0
start_process: Callable[..., Any] = subprocess.Popen  # starts each rank; a test suite may put one here that forks


@dataclass(frozen=True)
class Ended:
    """Say how one rank ended. code: its exit code, negative for a signal; None where it was killed for time."""

    rank: int
    code: int | None
    seconds: float
    out: str
    err: str


def free_port() -> int:
    """Return a TCP port that is free on the loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, size: int, port: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment that torchrun gives a rank, on one machine."""
    env = dict(os.environ)
    paths = [str(_LIBRARY), str(_LIBRARY.parent), env.get("PYTHONPATH", "")]
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    return env | dict(extra or {})


def run_ranks(
    size: int,
    target: str | Path,
    *args: object,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[Ended]:
    """Run `target` as `size` ranks and wait for all. target: "file.py", or "file.py::function" called with args as texts.

    No rank is stopped because another failed. Raises AssertionError, with every rank's last words, where one is still
    running after timeout_s, or (check) ended with another code than 0.
    """
    path, _, function = str(target).partition("::")
    command = [sys.executable, "-c", _CALL, path, function] if function else [sys.executable, path]
    command += [str(arg) for arg in args]
    port = free_port()

    # logs are files: a pipe that nobody reads fills up, and its rank stands still
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, contextlib.ExitStack() as stack:
        logs = [
            (
                stack.enter_context(Path(folder, f"{rank}.out").open("w+b")),
                stack.enter_context(Path(folder, f"{rank}.err").open("w+b")),
            )
            for rank in range(size)
        ]
        ended = _run(command, size, port, timeout_s, env, logs)

    # the rank that failed first is often not the one that is noticed: show them all
    wrong = [e for e in ended if e.code is None or (check and e.code != 0)]
    if wrong:
        messages = "\n".join(
            f"--- rank {e.rank}: code {e.code} after {e.seconds:.1f} s\n{e.out[-1500:]}{e.err[-3000:]}" for e in ended
        )
        raise AssertionError(
            f"ranks {[e.rank for e in wrong]} of {size} ended wrong (None: killed after {timeout_s} s)\n{messages}"
        )
    return ended


def _run(
    command: Sequence[str],
    size: int,
    port: int,
    timeout_s: float,
    env: Mapping[str, str] | None,
    logs: Sequence[tuple[IO[bytes], IO[bytes]]],
) -> list[Ended]:
    start = time.monotonic()
    processes = [
        start_process(command, env=rank_environment(rank, size, port, env), stdout=out, stderr=err)
        for rank, (out, err) in enumerate(logs)
    ]
    took = [0.0] * size

    # wait for all, also where one has failed, and note how long each lived
    try:
        while (running := [p.poll() is None for p in processes]) and any(running):
            now = time.monotonic() - start
            took = [now if alive else seconds for alive, seconds in zip(running, took)]
            if now > timeout_s:
                break
            time.sleep(0.02)
    finally:
        late = [p.poll() is None for p in processes]
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(_GRACE_S)

    # no exit code for those that had to be killed
    return [
        Ended(rank, None if late[rank] else process.returncode, took[rank], _read(logs[rank][0]), _read(logs[rank][1]))
        for rank, process in enumerate(processes)
    ]


def _read(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")
