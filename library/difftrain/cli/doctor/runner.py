"""Run checks in a process beside, with a limit of time for each: one that hangs or crashes ends that process only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import difftrain
from difftrain.cli.doctor.machine import installed
from difftrain.device.health import Context, Verdict

_LIBRARY = Path(difftrain.__file__).resolve().parents[1]
_START_S = 30.0  # for Python itself, on a slow disk
_END_S = 10.0
_SEVERAL = 2  # hangs after which devices are not touched any more
_MISSING_TORCH = "torch or numpy is not installed, so no device was checked"


class DoctorReport(NamedTuple):
    """One finding of one check, as it is reported. name: of the check, with ".what" where it found several things."""

    name: str
    verdict: Verdict
    observed: str
    remedy: str
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return the entry of the JSON document, where what was observed is called found."""
        return {"found" if name == "observed" else name: value for name, value in self._asdict().items()}


def examine(checks: Mapping[str, Check], context: Context) -> Iterator[DoctorReport]:
    """Do the checks in order and report each finding as it comes."""
    todo = dict(checks)

    # without torch or numpy, only the checks that need neither are done
    if any(installed(name) is None for name in ("torch", "numpy")):
        todo = {name: check for name, check in todo.items() if not check.needs}
        if len(todo) < len(checks):
            yield DoctorReport("devices", "wrong", _MISSING_TORCH, "pip install -r requirements.txt", 0.0)

    # one process does the checks; where one of them ends it, another goes on with the rest
    hung = 0
    while todo:
        with _DoctorWorker(todo, context) as worker:
            for name in list(todo):
                reports, ended = worker.reports_of(name, todo[name].limit_s)
                yield from reports
                needs = todo.pop(name).needs
                if name == DEVICES and any(report.verdict == "wrong" for report in reports) and not worker.usable:
                    todo = {left: check for left, check in todo.items() if check.needs != "device"}
                    break
                if ended:
                    hung += worker.hangs and needs == "device"
                    break
            else:
                worker.end()

        # each check on a device that hangs would wait out its limit: the rest of them are left out
        if hung >= _SEVERAL:
            left = [name for name, check in todo.items() if check.needs == "device"]
            todo = {name: check for name, check in todo.items() if check.needs != "device"}
            if left:
                remedy = "fix what hangs first; npu-smi info or nvidia-smi show the state of the devices"
                yield DoctorReport(
                    "devices", "note", f"not checked, since the device hangs: {', '.join(left)}", remedy, 0.0
                )


class _DoctorWorker:
    """The process that does the checks, and the pipe on which it tells what it finds."""

    def __init__(self, checks: Mapping[str, Check], context: Context) -> None:
        self._order = json.dumps(
            {"context": asdict(context), "checks": {name: check.target for name, check in checks.items()}}
        )
        self._buffer = b""
        self._ready = False  # its first line says that Python is up; the limits of checks count from then on
        self.hangs = False
        self.usable = True  # a device was taken

    def __enter__(self) -> _DoctorWorker:
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._pipe, inner = os.pipe()
        paths = [str(_LIBRARY), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "difftrain.cli.doctor.worker", str(inner), self._order],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[inner],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        os.close(inner)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        os.close(self._pipe)
        self._log.close()

    def reports_of(self, name: str, limit_s: float) -> tuple[list[DoctorReport], bool]:
        """Return what a check found, and whether the process ended with it, by a crash or for taking too long."""
        start = time.monotonic()
        if not self._ready and self._next(start + _START_S) is None:
            return [self._lost(name, time.monotonic() - start, _START_S)], True
        self._ready, begun = True, time.monotonic()
        message = self._next(begun + limit_s)
        if message is None:
            return [self._lost(name, time.monotonic() - begun, limit_s)], True
        self.usable = message["usable"]
        seconds = round(message["seconds"], 3)
        return [
            DoctorReport(f"{name}.{about}" if about else name, verdict, what, remedy, seconds)
            for verdict, what, remedy, about in message["findings"]
        ], False

    def end(self) -> None:
        """Let the process end by itself, so that it gives its device back."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Read a line from the process; None where it ends, or none comes in time."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                self.hangs = True
                return None
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _lost(self, name: str, seconds: float, limit_s: float) -> DoctorReport:
        if self.hangs:
            self._kill()
            what = f"{name}: no answer within {limit_s:g} s, so it was stopped{self._last_words()}"
            return DoctorReport(
                name, "wrong", what, "find out what it waits for: the driver, a network disk, another machine", seconds
            )
        self.end()
        code = self._process.returncode
        how = f"died of {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        what = f"{name}: the process that checked it {how}{self._last_words()}"
        return DoctorReport(name, "wrong", what, "report it with this text; the driver's log may say more", seconds)

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4096))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"; its last output: {lines[-1]}" if lines else ""

    def _kill(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits in the kernel cannot be ended
            self._process.wait(_END_S)


# --- The checks of the doctor, in the order in which they are done


Needs = Literal["", "torch", "device"]


class Check(NamedTuple):
    """One check. target: "module:function" of a Context, which gives Findings. limit_s: after it, it hangs."""

    target: str
    limit_s: float
    needs: Needs = ""


CHECKS: dict[str, Check] = {
    "system": Check("difftrain.cli.doctor.machine:check_machine", 30),
    "packages": Check("difftrain.cli.doctor.machine:check_packages", 30),
    "installation": Check("difftrain.device.health.install:check", 30),
    "variables": Check("difftrain.device.health.variables:check", 30),
    "launch": Check("difftrain.cli.doctor.machine:launch", 30),
    "folders": Check("difftrain.cli.doctor.folders:check", 60),
    "imports": Check("difftrain.cli.doctor.machine:imports", 180, "torch"),
    "devices": Check("difftrain.device.health.install:check_devices", 120, "torch"),
    "memory": Check("difftrain.device.health.install:check_memory", 120, "device"),
    "noise": Check("difftrain.cli.doctor.machine:noise", 60, "device"),
    "attention": Check("difftrain.device.health.numerics:attention", 180, "device"),
    "kernels": Check("difftrain.device.health.numerics:kernels", 180, "device"),
    "overflow": Check("difftrain.device.health.numerics:overflow", 60, "device"),
    "precision": Check("difftrain.device.health.numerics:precision", 60, "device"),
    "compiler": Check("difftrain.cli.doctor.machine:compiler", 60, "device"),
    "speed": Check("difftrain.cli.doctor.machine:speed", 120, "device"),
    "collective": Check("difftrain.cli.doctor.collective:check", 180, "device"),
}
DEVICES = "devices"  # where it is wrong, checks that need a device are left out
QUICK_LEAVES_OUT = ("speed", "collective")
