"""Processes forked from one that has imported torch, diffusers and difftrain: a start takes 3 s of a core, not 12.

What is run is the same: the script, module or code of a command line of this Python, with its own arguments,
environment, folder, session and output. Three things differ, and a test of one of them starts a cold process
(subprocess.Popen): what is imported, and when; what importing takes; and memory, of which a fork begins with the
host's. Commands of other programs, and environments that imports read (COLD), start cold by themselves.
torchrun starts its ranks from a host of its own, so that they are its descendants.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).resolve().parents[2] / "library"
TORCHRUN = "torch.distributed.run"
# read where something is imported, so a host that was started with another value is none for the process
COLD = ("HF_", "HUGGING", "PYTHON", "LD_", "OMP_", "MKL_", "TORCH_LOGS", "TORCHDYNAMO", "TRANSFORMERS", "DIFFUSERS",
        "CUDA_", "ASCEND_")  # fmt: skip
FREE = {"PYTHONPATH"}
SINGLE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
HOST = "rank-host"  # what the process that ranks are forked from calls itself
LARGEST = 1 << 20  # bytes of a request


# ------------------------------------------------------------------ the caller's side


class Host:
    """A process to fork from, and the exit codes of what was forked."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lock = channel, threading.Lock()
        self._codes: dict[int, int] = {}

    def fork(self, words: Sequence[str], env: Mapping[str, str], cwd: str, streams: Sequence[int]) -> int:
        """Start a command with these file descriptors as its input, output and errors; return its process id."""
        request = json.dumps({"words": list(words), "env": dict(env), "cwd": cwd}).encode()
        with self._lock:
            socket.send_fds(self._channel, [request], list(streams))
            while True:
                told = json.loads(self._channel.recv(LARGEST))
                if "code" not in told:
                    return int(told["pid"])
                self._codes[told["pid"]] = told["code"]

    def code(self, pid: int) -> int | None:
        """Return how a process ended; None while it runs."""
        with self._lock:
            while select.select([self._channel], [], [], 0)[0]:
                if not (message := self._channel.recv(LARGEST)):
                    return self._codes.get(pid, -signal.SIGKILL)  # the host is gone, and with it the answer
                told = json.loads(message)
                self._codes[told["pid"]] = told["code"]
            return self._codes.get(pid)


class Forked:
    """A forked process, as subprocess.Popen has one."""

    stdin = stderr = None

    def __init__(self, host: Host, words: Sequence[str], pid: int, stdout: io.TextIOWrapper | None) -> None:
        self.args, self.pid, self.stdout, self.returncode = words, pid, stdout, None
        self._host, self._reader, self._text = host, None, ""

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._host.code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, _: None = None, timeout: float | None = None) -> tuple[str, None]:
        if self.stdout is not None:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            self._reader.join(timeout)
            if self._reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return self._text, None

    def _read(self) -> None:
        assert self.stdout is not None
        self._text = self.stdout.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_host: Host | None = None
_base: dict[str, str] = {}


def popen(
    words: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: Any = None, stderr: Any = None,
    cwd: str | Path | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Start a command as subprocess.Popen does, from a process that has imported what it will: see this file's head."""
    words, told = [str(word) for word in words], dict(os.environ if env is None else env)
    if not is_warm(words, told):
        return subprocess.Popen(words, env=told, stdout=stdout, stderr=stderr, cwd=cwd, **more)
    host = _running()
    reads, inner = None, stdout
    if stdout == subprocess.PIPE:
        mine, inner = os.pipe()
        reads = os.fdopen(mine, encoding="utf-8", errors="replace")
    with Path(os.devnull).open("rb") as nothing:
        out = 1 if inner is None else inner if isinstance(inner, int) else inner.fileno()
        err = out if stderr == subprocess.STDOUT else 2 if stderr is None else stderr.fileno()
        pid = host.fork(words, told, str(cwd or Path.cwd()), [nothing.fileno(), out, err])
    if reads is not None:
        os.close(inner)
    return Forked(host, words, pid, reads)


def is_warm(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Tell whether a fork does what a fresh process would."""
    if words[0] != sys.executable or "difftrain.testing.imports" in words:
        return False
    there = {**(_base or os.environ), **SINGLE}
    here = {"MKL_NUM_THREADS": "1", **env}
    read = {name for name in {*there, *here} if name.startswith(COLD)} - FREE
    return all(there.get(name) == here.get(name) for name in read)


def _running() -> Host:
    """Return the host of this process, which ends with it."""
    global _host
    if _host is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        _base.update(os.environ)
        words = [sys.executable, __file__, str(theirs.fileno())]
        subprocess.Popen(
            words, pass_fds=[theirs.fileno()], env={**os.environ, **SINGLE}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        _host = Host(ours)
    return _host


# ------------------------------------------------------------------ the host's side


def serve(channel: socket.socket) -> None:
    """Fork what is asked for until nobody asks any more; return in the forked process, its command in place."""
    alive: set[int] = set()
    while True:
        for told in _ended(alive):
            channel.send(json.dumps(told).encode())
        if not select.select([channel], [], [], 0.005 if alive else None)[0]:
            continue
        message, streams, _, _ = socket.recv_fds(channel, LARGEST, 3)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(json.loads(message), streams)
            return
        for stream in streams:
            os.close(stream)
        alive.add(pid)
        channel.send(json.dumps({"pid": pid}).encode())


def _ended(alive: set[int]) -> list[dict[str, int]]:
    """Take those that have ended out, with their exit codes."""
    found = []
    for pid in list(alive):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            alive.discard(pid)
            found.append({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
    return found


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Take on a request's session, streams, folder, environment and arguments."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.chdir(request["cwd"])
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    os.environ.update(request["env"])
    here = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in here if path not in sys.path]
    words = request["words"][1:]
    if words[0] == "-u":
        words = words[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
    sys.argv = words


def run() -> None:
    """Run sys.argv as Python would."""
    if sys.argv[0] == "-c":
        code, sys.argv = sys.argv[1], ["-c", *sys.argv[2:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif sys.argv[0] == "-m":
        name, sys.argv = sys.argv[1], sys.argv[1:]
        if name == TORCHRUN:
            _ranks_from_a_host()
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _ranks_from_a_host() -> None:
    """Let torchrun fork its ranks: from a child of its own that was made before it has threads."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    if os.fork() == 0:
        ours.close()
        _call_oneself(HOST)
        serve(theirs)
        _call_oneself("python")
        run()
        sys.exit(0)
    theirs.close()
    host = Host(ours)

    def forked(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Forked:
        out, err = (stream.fileno() if stream else number for number, stream in ((1, self._stdout), (2, self._stderr)))
        return Forked(host, args, host.fork(args, env, str(Path.cwd()), [0, out, err]), None)

    SubprocessHandler._popen = forked


def _call_oneself(name: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _import() -> None:
    """Import what a run of any family does, save for what it decides by itself."""
    sys.path.insert(0, str(LIBRARY))
    import diffusers
    import transformers

    import difftrain.models.sd3.family
    import difftrain.models.sdxl.family
    import difftrain.train.run  # noqa: F401

    for name in ("AutoencoderKL", "UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel",
                 "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"):  # fmt: skip
        getattr(diffusers, name)
    for name in ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"):
        getattr(transformers, name)


if __name__ == "__main__":
    made = socket.socket(fileno=int(sys.argv[1]))
    _import()
    serve(made)
    run()
