"""Processes forked from one that has imported torch, diffusers and difftrain: a start takes 3 s of a core, not 12.

What runs is the script, module or code of a command line of this Python, with its own arguments, environment, folder,
session and output. A test of what differs starts a cold process (subprocess.Popen): which modules are imported, and
when; what that takes; memory, of which a fork begins with the host's; the parent process. Sets of texts are iterated in
the order of one of two hosts, in turn. What is no plain command of this Python, or has an environment that imports read
(READ_AT_IMPORT), starts cold by itself. Under test/simulated_npu/run the hosts have imported torch_npu, and touched no
device. torchrun and accelerate start their ranks from a host of their own: they are its descendants.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

LIBRARY = Path(__file__).resolve().parents[2] / "library"
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch")  # they start ranks in their own process
READ_AT_IMPORT = ("HF_", "HUGGING", "PYTHON", "LD_", "OMP_", "MKL_", "TORCH_LOGS", "TORCHDYNAMO", "TORCH_DEVICE", "TRANSFORMERS",
                  "DIFFUSERS", "CUDA_", "ASCEND_", "SIMULATED_NPU_")  # fmt: skip
# of these names, what is looked at when it is needed
READ_LATER = {"PYTHONPATH", "HF_TOKEN", "TORCH_DEVICE_BACKEND_AUTOLOAD", "ASCEND_DEVICE_ID", "SIMULATED_NPU_MEMORY_GIB",
              "SIMULATED_NPU_SATURATE", "SIMULATED_NPU_COUNTS"}  # fmt: skip
SINGLE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SEEDS = ("1", "2")  # PYTHONHASHSEED of the hosts
SIMULATED = "SIMULATED_NPU_LIBRARIES"  # test/simulated_npu/run sets it
HOST = "rank-host"  # what the process that ranks are forked from calls itself
LARGEST = 1 << 20  # bytes of a message
PATIENCE_S = 120.0  # for a host to import


# ------------------------------------------------------------------ the caller's side


class Host:
    """A process to fork from. What is forked stays a zombie until its exit code is asked for, as a child does."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._channel, self._process, self._lock = channel, process, threading.Lock()
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
    if not _hosts:
        _base.update(os.environ)
        _hosts.extend(map(_started, SEEDS))
    return _hosts[next(_turns) % len(_hosts)]


def _started(seed: str) -> Host:
    ours, theirs = _pair()
    path = () if SIMULATED in os.environ else ("PYTHONPATH",)  # where torch_npu lies, and what makes its devices
    env = {name: value for name, value in os.environ.items() if name not in path} | SINGLE
    # hubs' libraries put their own folders below it where they are imported: those of no user
    nobody = str(Path(tempfile.gettempdir()) / "difftrain-tests-without-cache")
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, env={**env, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": nobody}, start_new_session=True,
    )  # fmt: skip
    theirs.close()
    return Host(ours, process)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Make two ends of a channel that keeps messages apart, and takes a whole environment in one."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    return ends


# ------------------------------------------------------------------ the host's side


def serve(channel: socket.socket) -> None:
    """Fork what is asked for until nobody asks any more; return in each forked process, its command in place."""
    running: set[int] = set()
    while True:
        for pid in list(running):
            # it stays a zombie, so that its number is nobody else's, until the caller knows how it ended
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                running.discard(pid)
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                channel.send(json.dumps({"pid": pid, "code": code}).encode())
        if not select.select([channel], [], [], 0.005 if running else None)[0]:
            continue
        content, streams, _, _ = socket.recv_fds(channel, LARGEST, 3)
        if not content:
            os._exit(0)
        message = json.loads(content)
        if "collect" in message:
            os.waitpid(message["collect"], 0)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                _become(message, streams)
            finally:
                channel.send(json.dumps({"pid": os.getpid()}).encode())
                channel.close()
            return
        for stream in streams:
            os.close(stream)
        running.add(pid)


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
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if SIMULATED in os.environ and os.environ.get("SIMULATED_NPU_COUNTS"):
        from simulator import install

        atexit.register(install._write_counts)  # as its import does
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
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif sys.argv[0] == "-m":
        name, sys.argv = sys.argv[1], sys.argv[1:]
        sys.path.insert(0, str(Path.cwd()))
        if name in LAUNCHERS:
            _fork_ranks()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def run_and_leave() -> NoReturn:
    """Run sys.argv and end as Python would, but leave its modules to the system: taking them apart costs half a second."""
    code: Any = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _fork_ranks() -> None:
    """Let torchrun fork its ranks: from a child of its own that was made before it has threads."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    ours, theirs = _pair()
    if os.fork() == 0:
        ours.close()
        os.setpgid(0, 0)  # a signal to torchrun's group is not meant for it; it ends with torchrun
        _call_oneself(HOST)
        del sys.path[0]
        serve(theirs)
        _call_oneself("python")
        run_and_leave()
    theirs.close()
    host, cold = Host(ours), SubprocessHandler._popen
    own = dict(os.environ)

    def forked(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        _base.update(own)
        if not is_warm(args, env):
            return cold(self, args, env)
        out, err = (stream.fileno() if stream else number for number, stream in ((1, self._stdout), (2, self._stderr)))
        return Forked(host, args, host.fork(args, env, str(Path.cwd()), [0, out, err]), None)

    SubprocessHandler._popen = forked


def _call_oneself(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


def _import() -> None:
    """Import what a run of any family does, after what every door does before it imports."""
    gc.disable()  # until all is imported, which takes a sixth less so
    sys.path.insert(0, str(LIBRARY))
    from difftrain.config.hidden_imports import defer_scipy, hold_back
    from difftrain.device.choice import calm_threads, hold_autoload

    hold_back()
    hold_autoload()
    calm_threads()

    if SIMULATED in os.environ:
        import torch_npu  # noqa: F401  # which touches no device
    defer_scipy()
    import diffusers
    import transformers

    import difftrain.config.parse_flags
    import difftrain.config.parse_keys
    import difftrain.engine.native
    import difftrain.models.export
    import difftrain.models.families.sd3.family
    import difftrain.models.families.sdxl
    import difftrain.train.door
    import difftrain.train.run  # noqa: F401
    from difftrain.models.text.clip_tokens import PAD_1, PAD_2
    from difftrain.models.text.tokenize import small_clip, small_t5
    from difftrain.report import peaks

    for name in ("AutoencoderKL", "UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel",
                 "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"):  # fmt: skip
        getattr(diffusers, name)
    for name in ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"):
        getattr(transformers, name)
    for size, pad in ((834, PAD_1), (674, PAD_2)):  # the vocabularies of the tiny sizes, learned once
        small_clip(size, pad)
    small_t5(384)
    peaks.CPU_BUDGET_S = 0.02  # a figure of no interest here, at the end of every run
    sys.path.remove(str(LIBRARY))
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    gc.enable()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork has one of them, and the locks of all"


if __name__ == "__main__":
    made = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]
    _import()
    serve(made)
    run_and_leave()
