"""What support/warm.py forks from: it imports what the product does, once, and forks a host for whoever connects to it.

Run as a script, with the file descriptor of a socket that listens, and the id of the process while which it stays.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import warm
from warm import HOST, LARGEST, SIMULATED, Forked, Host, is_warm, pair

LIBRARY = Path(__file__).resolve().parents[2] / "library"
# what not every run imports; DeepSpeed and bitsandbytes want the compiler for a function that few call
ALSO = ("numpy.ma", "torch.distributed.optim", "torch.utils.tensorboard", "torch._inductor.compile_fx", "pytest")
_HUGEPAGE, _COLLAPSE = 14, 25  # of madvise(2)
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch")  # they start ranks in their own process


class Counted(dict[str, Any]):
    """What passes cost (models/flops.py), also in a folder: half a second to two that one of many processes spends."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key):
            with contextlib.suppress(FileNotFoundError):  # nobody has counted it
                super().__setitem__(str(key), json.loads(self._file(str(key)).read_text()))
        return super().__contains__(key)

    def __setitem__(self, key: str, counts: Any) -> None:
        super().__setitem__(key, counts)
        ours = self._file(key).with_suffix(f".{os.getpid()}")
        ours.write_text(json.dumps(counts))
        ours.replace(self._file(key))

    def _file(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def fork_hosts(listener: socket.socket, session: int, counted: Path) -> None:
    """Fork a host for whoever connects, until a session's process is no more; return in each forked command."""
    while Path(f"/proc/{session}").exists():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        channel, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
            channel.send(b"ready")
            serve(channel)
            return
        channel.close()
    shutil.rmtree(counted, ignore_errors=True)
    os._exit(0)


def serve(channel: socket.socket) -> None:
    """Fork what is asked for until nobody asks any more; return in each forked process, its command in place."""
    running: dict[int, int] = {}  # a descriptor that is ready when a process ends -> its id
    while True:
        ready = select.select([channel, *running], [], [])[0]
        for ending in [each for each in ready if each is not channel]:
            # it stays a zombie, so that its number is nobody else's, until the caller knows how it ended
            pid = running.pop(ending)
            os.close(ending)
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            channel.send(json.dumps({"pid": pid, "code": code}).encode())
        if channel not in ready:
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
            for each in running:
                os.close(each)
            try:
                _become(message, streams)
            finally:
                channel.send(json.dumps({"pid": os.getpid()}).encode())
                channel.close()
            return
        for stream in streams:
            os.close(stream)
        running[os.pidfd_open(pid)] = pid


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
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: ""  # for its debug log, by looking through all modules

    ours, theirs = pair()
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
        warm._base.update(own)
        if not is_warm(args, env):
            return cold(self, args, env)
        out, err = (stream.fileno() if stream else number for number, stream in ((1, self._stdout), (2, self._stderr)))
        return Forked(host, args, host.fork(args, env, str(Path.cwd()), [0, out, err]), None)

    SubprocessHandler._popen = forked


def _call_oneself(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


def _import(counted: Path) -> None:
    """Import what a run of any family does, after what every door does before it imports. counted: the folder of Counted."""
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
    from difftrain.config import TrainConfig
    from difftrain.diffusion.draws import normal
    from difftrain.models import flops
    from difftrain.models.registry import make_family
    from difftrain.models.text.clip_tokens import PAD_1, PAD_2
    from difftrain.models.text.tokenize import small_clip, small_t5
    from difftrain.report import peaks
    from difftrain.report.environment import versions

    for name in ALSO:
        importlib.import_module(name)
    for name in ("AutoencoderKL", "UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel",
                 "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"):  # fmt: skip
        getattr(diffusers, name)
    for name in ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"):
        getattr(transformers, name)
    for size, pad in ((834, PAD_1), (674, PAD_2)):  # the vocabularies of the tiny sizes, learned once
        small_clip(size, pad)
    small_t5(384)
    for name in ("sdxl", "sd3"):  # their tiny parts are built once, and copied afterwards
        tiny = TrainConfig.model_validate({"model": {"family": name, "init_from_config": "tiny"}})
        make_family(tiny).load(meta=True)
    normal(0, b"", 0, "", (1,))  # makes its table
    versions()
    flops._known = Counted(counted)  # type: ignore[assignment]
    peaks.CPU_BUDGET_S = 0.02  # a figure of no interest here, at the end of every run
    sys.path.remove(str(LIBRARY))
    sys.stdout.flush()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # operators of libraries, taken apart one by one at the end of each process
    gc.collect()
    _in_large_pages()
    gc.freeze()
    gc.enable()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork has one of them, and the locks of all"


def _in_large_pages() -> None:
    """Lay what has been allocated in pages of 2 MiB: there are fewer to copy, and a fork takes a third of the time."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, *_, inode, name = [*line.split(None, 5), ""][:6]
        if rights == "rw-p" and inode == "0" and name.strip() in ("", "[heap]"):
            start, end = (int(each, 16) for each in place.split("-"))
            for advice in (_HUGEPAGE, _COLLAPSE):  # of a kernel that does not know them, they change nothing
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


if __name__ == "__main__":
    made, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    del sys.path[0]
    # both of a session share what they count; its id alone may come again, and a copy of this checkout counts for itself
    begun = Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()[19]
    shared = hashlib.sha256(json.dumps([owner, begun, __file__, SIMULATED in os.environ]).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"difftrain-counted-{shared[:16]}"
    folder.mkdir(exist_ok=True)
    _import(folder)
    fork_hosts(made, owner, folder)
    run_and_leave()
