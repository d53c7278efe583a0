"""Start the ranks with torchrun, and end as they end: `workers.py LOG DIGEST '["--nnodes=1", …]'`.

Several machines wait for one another first (rendezvous.py), since torchrun waits in silence.

torchrun itself turns every failure into exit code 1; here a fault of the configuration stays 2, and a run that was
asked to stop says so. Everything that is printed goes into the log too.

torchrun runs in a process below this one, in a session of its own, and signals do not go to it: it would kill ranks
that still save after 30 s (only recent versions can be told otherwise). They go to the ranks themselves, which save
and end in their own time.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

PREEMPTED = 75  # as train/triggers.py has it
# how ranks end that need not be started again: a wrong configuration, a notice of pre-emption, a stop that was asked for
FINAL = (2, PREEMPTED, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
IMPATIENT_S = 5.0  # signals that come closer together are one wish, as the ranks see it
TORCHRUN = "--torchrun"  # the first argument of the process that becomes torchrun
# where torchrun makes the stores of a single machine
STORES = (
    "torch.distributed",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
)


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


def ranks_of(torchrun: int) -> list[int]:
    """Return the processes that torchrun has started as ranks, by what it puts into their environment."""
    ranks = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == torchrun and b"\0LOCAL_RANK=" in b"\0" + (entry / "environ").read_bytes():
                ranks.append(int(entry.name))
        except OSError:  # gone meanwhile
            continue
    return sorted(ranks)


def listens(pid: int) -> bool:
    """Say whether a process has a handler for SIGUSR1, which would end it otherwise."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


class Wishes:
    """Hand signals on to the ranks of a torchrun, and to nobody else.

    The first stop lets them save, the second ends them at once, the third kills them where they hang.
    """

    def __init__(self) -> None:
        self.torchrun = 0  # its process, once there is one
        self._stops = 0
        self._stopped_at = 0.0
        self.stopped_by = 0

    def listen(self) -> None:
        """Install the handlers. A terminal that closes is a wish to stop, but not under nohup."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._take)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._take)

    def _take(self, number: int, _frame: Any) -> None:
        ranks = ranks_of(self.torchrun) if self.torchrun else []
        if number == signal.SIGUSR1:
            listening = [pid for pid in ranks if listens(pid)]
            if not listening:
                _log("SIGUSR1: nothing to save, training has not started")
            _send(listening, number)
            return
        now = time.monotonic()
        if self._stops and now - self._stopped_at < IMPATIENT_S:
            return
        self._stops, self._stopped_at, self.stopped_by = self._stops + 1, now, self.stopped_by or number
        if not ranks:  # it looks for the other machines, or is at its end
            _log(f"stopped by {signal.Signals(number).name}: no rank is running")
            if not self.torchrun:
                raise SystemExit(128 + number)
            _send([self.torchrun], signal.SIGTERM)
        elif self._stops > 2:
            _send(ranks, signal.SIGKILL)
        else:
            for pid in ranks:  # one that has not begun is ended by SIGTERM without a traceback
                _send([pid], number if number == signal.SIGINT and listens(pid) else signal.SIGTERM)


def _log(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # from a signal handler, where print may be in use


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # gone meanwhile
            continue


def watch(words: list[str]) -> int:
    """Run torchrun below this process; return the exit code of the rank that failed first, or 0."""
    wishes = Wishes()
    wishes.listen()
    command = [sys.executable, __file__, TORCHRUN, str(os.getpid()), json.dumps(words)]
    torchrun = subprocess.Popen(command, start_new_session=True)
    wishes.torchrun = torchrun.pid
    code = torchrun.wait()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end is being written
    code = 128 - code if code < 0 else code
    return 128 + wishes.stopped_by if wishes.stopped_by and code == 128 + signal.SIGTERM else code


def end_with(launcher: int) -> None:
    """Ask for SIGTERM when the launcher is killed, so that no job goes on that nobody can see."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:  # it is gone already
        sys.exit(1)


def run(words: list[str]) -> int:
    """Run torchrun in this process; return the exit code of the rank that failed first, or 0."""
    gc.disable()  # until torch is imported, which takes a sixth less so
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    from difftrain.distributed.loopback import stores_on_loopback
    from difftrain.launch import rendezvous

    gc.freeze()
    gc.enable()
    _judge_before_restarts()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its tables bury the ranks' messages
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        machine = rendezvous.machine_of(words)
        store = rendezvous.meet(machine, _print) if machine else None  # torchrun takes it over
        with nullcontext() if machine else stores_on_loopback(*STORES):
            main(words)
        del store
    except rendezvous.RendezvousFailed as failed:
        _print(str(failed))
        return failed.code
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        port = next((word.partition("=")[2] for word in words if word.startswith("--master_port=")), "")
        _print(f"--master_port: port {port} of this machine is in use, by another job perhaps (give another one)")
        return 2
    except DistError as error:
        _print(f"the machines lost contact before training started: {rendezvous.first_line(error)}")
        return 1
    except ChildFailedError as error:
        return _verdict(error)
    except SignalException as stopped:
        print(f"stopped by {signal.Signals(stopped.sigval).name}", flush=True)
        return 128 + int(stopped.sigval)
    return 0


def _print(text: str) -> None:
    print(text, flush=True)


def _judge_before_restarts() -> None:
    """Let torchrun start ranks again only where that may help, and say so: it would do that for a wrong flag as well."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    monitor = LocalElasticAgent._monitor_workers

    def judging(self: Any, group: Any) -> Any:
        result = monitor(self, group)
        if not result.is_failed() or self._remaining_restarts < 1:
            return result
        codes = [int(failure.exitcode) for failure in result.failures.values()]
        if any(code in FINAL for code in codes):
            self._remaining_restarts = 0
        else:
            rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
            count = group.spec.max_restarts - self._remaining_restarts + 1
            _print(f"{_how(rank, int(failure.exitcode))}: all ranks start again ({count} of {group.spec.max_restarts})")
        return result

    LocalElasticAgent._monitor_workers = judging  # type: ignore[method-assign]


def _how(rank: int, code: int) -> str:
    """Say how a rank ended. A signal counts as 128 + its number, as shells count."""
    if code < 0:
        return f"rank {rank} was ended by {signal.Signals(-code).name}"
    return f"rank {rank} failed with exit code {code}"


def _verdict(error: Any) -> int:
    """Name the rank that failed first."""
    rank, failure = error.get_first_failure()
    code = int(failure.exitcode)
    if code == PREEMPTED:
        print(f"the run was saved and ended with exit code {code}: a notice of pre-emption was there", flush=True)
    elif code != 2:  # 2 has said what is wrong
        print(_how(rank, code), flush=True)
    return 128 - code if code < 0 else code


def main(argv: list[str]) -> int:
    """Watch over torchrun, or be it."""
    if argv[0] == TORCHRUN:
        end_with(int(argv[1]))
        return run(json.loads(argv[2]))
    log, config_digest = Path(argv[0]), argv[1]
    with logged(log):
        exit_code = watch(json.loads(argv[2]))
    if exit_code == 0:
        from difftrain.launch.occupant import write_note

        write_note(log.parent, config_digest, finished=True)
    return exit_code


if __name__ == "__main__":
    library = str(Path(__file__).resolve().parents[2])
    sys.path[:1] = [] if library in sys.path[1:] else [library]  # this file runs as a script
    sys.exit(main(sys.argv[1:]))
