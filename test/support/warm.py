"""Processes forked from one that has imported torch, diffusers and difftrain: imports take 7 s of a core, a fork 10 ms.

What runs is the script, module or code of a command line of this Python, with its own arguments, environment, folder,
session and output. A test of what differs starts a cold process (subprocess.Popen): which modules are imported, and
when; what that takes; memory, of which a fork begins with the host's; the parent process. Sets of texts are iterated in
the order of one of two hosts, in turn. What is no plain command of this Python, or has an environment that imports read
(READ_AT_IMPORT), starts cold by itself. Under test/simulated_npu/run the hosts have imported torch_npu, and touched no
device. torchrun and accelerate start their ranks from a host of their own: they are its descendants.

What is imported is imported once for the workers of pytest, and for the tiers of one test/run_tests.sh: warm_host.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FORKS = Path(__file__).with_name("warm_host.py")
READ_AT_IMPORT = ("HF_", "HUGGING", "PYTHON", "LD_", "OMP_", "MKL_", "TORCH_LOGS", "TORCHDYNAMO", "TORCH_DEVICE", "TRANSFORMERS",
                  "DIFFUSERS", "CUDA_", "ASCEND_", "SIMULATED_NPU_")  # fmt: skip
# of these names, what is looked at when it is needed
READ_LATER = {"PYTHONPATH", "HF_TOKEN", "TORCH_DEVICE_BACKEND_AUTOLOAD", "ASCEND_DEVICE_ID", "SIMULATED_NPU_MEMORY_GIB",
              "SIMULATED_NPU_SATURATE", "SIMULATED_NPU_COUNTS"}  # fmt: skip
SINGLE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SEEDS = ("1", "2")  # PYTHONHASHSEED of the hosts
SIMULATED = "SIMULATED_NPU_LIBRARIES"  # test/simulated_npu/run sets it
SHARED_BY = "DIFFTRAIN_TESTS"  # the process, by its id, while which hosts stay: test/run_tests.sh sets it
HOST = "rank-host"  # what the process that ranks are forked from calls itself
LARGEST = 1 << 20  # bytes of a message
PATIENCE_S = 120.0  # for a host to import


class Host:
    """A process to fork from. What is forked stays a zombie until its exit code is asked for, as a child does."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lock = channel, threading.Lock()
        self._codes: dict[int, int] = {}

    def fork(self, words: Sequence[str], env: Mapping[str, str], cwd: str, streams: Sequence[int]) -> int:
        """Start a command with these file descriptors as its input, output and errors; return its process id."""
        request = {"words": list(words), "env": dict(env), "cwd": cwd}
        with self._lock:
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], list(streams))
                while "code" in (message := self._receive()):
                    self._codes[message["pid"]] = message["code"]
            except ConnectionError as error:
                raise RuntimeError(f"what {words[1:3]} was to be forked from has ended") from error
            return int(message["pid"])

    def code(self, pid: int) -> int | None:
        """Return how a process ended, once; None while it runs."""
        with self._lock:
            while pid not in self._codes and select.select([self._channel], [], [], 0)[0]:
                message = self._receive()
                self._codes[message["pid"]] = message["code"]
            if pid not in self._codes:
                return None
            self._channel.send(json.dumps({"collect": pid}).encode())
            return self._codes.pop(pid)

    def _receive(self) -> dict[str, int]:
        if not select.select([self._channel], [], [], PATIENCE_S)[0]:
            raise TimeoutError("the process to fork from says nothing")
        content = self._channel.recv(LARGEST)
        if not content:
            raise ConnectionError("the process to fork from has ended")
        message: dict[str, int] = json.loads(content)
        return message


class Forked:
    """A forked process, as subprocess.Popen has one."""

    stdin = stderr = None

    def __init__(self, host: Host, words: Sequence[str], pid: int, stdout: io.TextIOWrapper | None) -> None:
        self.args, self.pid, self.stdout = words, pid, stdout
        self.returncode: int | None = None
        self._host, self._text = host, ""
        self._reader: threading.Thread | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._host.code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        return code

    def communicate(self, _: None = None, timeout: float | None = None) -> tuple[str, None]:
        start = time.monotonic()
        if self.stdout is not None:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            self._reader.join(timeout)
            if self._reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - start)))
        return self._text, None

    def _read(self) -> None:
        assert self.stdout is not None
        with self.stdout:
            self._text = self.stdout.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_hosts: list[Host] = []
_turns = itertools.count()
_base: dict[str, str] = {}  # the environment that the hosts have imported in


def popen(
    words: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: Any = None, stderr: Any = None,
    cwd: str | Path | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Start a command as subprocess.Popen does, from a process that has imported what it will: see this file's head."""
    words, wanted = [str(word) for word in words], dict(os.environ if env is None else env)
    plain = more.keys() <= {"text", "start_new_session"} and stdout != subprocess.DEVNULL
    plain = plain and stderr not in (subprocess.PIPE, subprocess.DEVNULL)
    if not plain or not is_warm(words, wanted):
        return subprocess.Popen(words, env=wanted, stdout=stdout, stderr=stderr, cwd=cwd, **more)
    host = _next_host()
    reads, inner = None, stdout
    if stdout == subprocess.PIPE:
        mine, inner = os.pipe()
        reads = os.fdopen(mine, encoding="utf-8", errors="replace")
    with Path(os.devnull).open("rb") as nothing:
        out = 1 if inner is None else inner if isinstance(inner, int) else inner.fileno()
        err = out if stderr == subprocess.STDOUT else 2 if stderr is None else stderr.fileno()
        pid = host.fork(words, wanted, str(cwd or Path.cwd()), [nothing.fileno(), out, err])
    if reads is not None:
        os.close(inner)
    return Forked(host, words, pid, reads)


@contextlib.contextmanager
def starts_forked() -> Iterator[None]:
    """Fork the doors, and the ranks of small jobs, for a while."""
    import pytest
    from doors import Door

    from difftrain.testing import spawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "start_process", popen)
        patch.setattr(Door, "popen", staticmethod(popen))
        yield


def completed(
    words: Sequence[str], *, env: Mapping[str, str], timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as subprocess.run does, its output captured."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = popen(words, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        output, _ = process.communicate(timeout=timeout)
        errors.seek(0)
        return subprocess.CompletedProcess(words, process.returncode, output, errors.read())


def is_warm(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Tell whether a fork does what a fresh process would."""
    if sys.platform != "linux" or words[0] != sys.executable or "difftrain.testing.imports" in words:
        return False
    if words[1].startswith("-") and words[1] not in ("-u", "-c", "-m"):
        return False
    ours, its = {**(_base or os.environ), **SINGLE}, {"MKL_NUM_THREADS": "1", **env}
    read = {name for name in {*ours, *its} if name.startswith(READ_AT_IMPORT)} - READ_LATER
    return all(ours.get(name) == its.get(name) for name in read)


def _next_host() -> Host:
    """Return the host whose turn it is; they end with this process."""
    if not _base:
        _base.update(os.environ)
        for seed in SEEDS:  # side by side
            _import_for_all(seed)
    at = next(_turns) % len(SEEDS)
    if at == len(_hosts):
        _hosts.append(_connected(SEEDS[at]))
    return _hosts[at]


def _connected(seed: str) -> Host:
    """Return a host of one's own, forked from what has imported."""
    for _ in range(3):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        with contextlib.suppress(ConnectionError):
            channel.connect(_address(seed))
            if select.select([channel], [], [], PATIENCE_S)[0] and channel.recv(LARGEST):
                return Host(channel)
        channel.close()  # it has ended, or another process is about to start it
        time.sleep(0.1)
        _import_for_all(seed)
    raise RuntimeError("the process to fork from does not start")


def _address(seed: str) -> str:
    """Name a socket of this session, of processes with such an environment; the name ends with who listens."""
    session, read = _session(), sorted(item for item in _base.items() if item[0].startswith(READ_AT_IMPORT))
    key = json.dumps([session, seed, str(FORKS), sys.executable, read])
    return f"\0difftrain-{hashlib.sha256(key.encode()).hexdigest()}"


def _session() -> str:
    """Return the process while which hosts stay: that of all tiers, of all workers of one, or this."""
    return os.environ.get(SHARED_BY) or str(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())


def _import_for_all(seed: str) -> None:
    """Start what imports, listens, and ends with the session; unless another has begun to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_address(seed))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return
        listener.listen(64)  # who connects before all is imported waits
        path = () if SIMULATED in os.environ else ("PYTHONPATH",)  # where torch_npu lies, and what makes its devices
        env = {name: value for name, value in os.environ.items() if name not in path} | SINGLE
        # hubs' libraries put their own folders below it where they are imported: those of no user
        nobody = str(Path(tempfile.gettempdir()) / "difftrain-tests-without-cache")
        subprocess.Popen(
            [sys.executable, str(FORKS), str(listener.fileno()), _session()], pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            env={**env, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": nobody},
        )  # fmt: skip


def pair() -> tuple[socket.socket, socket.socket]:
    """Make two ends of a channel that keeps messages apart, and takes a whole environment in one."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    return ends
