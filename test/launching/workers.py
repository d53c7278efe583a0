"""Start the ranks with torchrun, and end as they end: `workers.py LOG DIGEST '["--nnodes=1", …]'`.

torchrun itself turns every failure into exit code 1; here a fault of the configuration stays 2, and a run that was
asked to stop says so. Everything that is printed goes into the log too. SIGUSR1 (save now) is handed on to the ranks.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Send standard output and error through tee, which outlives a Ctrl-C so that the last lines are kept."""
    tee = subprocess.Popen(["tee", "-a", str(path)], stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    kept = os.dup(1), os.dup(2)
    os.dup2(tee.stdin.fileno(), 1)
    os.dup2(tee.stdin.fileno(), 2)
    tee.stdin.close()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        tee.wait()


def children() -> list[int]:
    """Return the processes that this one has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(entry.parent.name))
    return found


def hand_on_usr1(ranks: int) -> None:
    """Pass SIGUSR1 to the ranks, which are the newest children, and to nobody else."""

    def handler(number: int, _frame: Any) -> None:
        for pid in sorted(children())[-ranks:]:
            os.kill(pid, number)

    signal.signal(signal.SIGUSR1, handler)


def run(words: list[str]) -> int:
    """Run torchrun in this process; return the exit code of the rank that failed first, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its tables bury the ranks' messages
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        main(words)
    except ChildFailedError as error:
        return _verdict(error)
    except SignalException as stopped:
        print(f"stopped by {signal.Signals(stopped.sigval).name}", flush=True)
        return 128 + int(stopped.sigval)
    return 0


def _verdict(error: Any) -> int:
    """Name the rank that failed first. A signal counts as 128 + its number, as shells count."""
    rank, failure = error.get_first_failure()
    code = int(failure.exitcode)
    if code < 0:
        print(f"rank {rank} was ended by {signal.Signals(-code).name}", flush=True)
        return 128 - code
    if code != 2:  # 2 has said what is wrong
        print(f"rank {rank} failed with exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from launching.occupant import write_note

    log, config_digest = Path(sys.argv[1]), sys.argv[2]
    arguments: list[str] = json.loads(sys.argv[3])
    count = next(int(word.split("=")[1]) for word in arguments if word.startswith("--nproc_per_node="))
    with logged(log):
        hand_on_usr1(count)
        exit_code = run(arguments)
    if exit_code == 0:
        write_note(log.parent, config_digest, finished=True)
    sys.exit(exit_code)
