"""One process a device, as a job has: they meet, and sum what only they know, in every precision of training."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftrain.device.health import Context, HealthFinding
from difftrain.device.health.install import link_remedy

LIMIT_S = 150.0  # the runner's limit is above it, so that what is known is told
_GRACE_S = 3.0  # for the others, once one has failed
_OF_A_LAUNCHER = ("TORCHELASTIC_", "PET_", "GROUP_", "ROLE_")


def check(context: Context) -> Iterator[HealthFinding]:
    """Start a rank for every device, two on the CPU, and compare their sums with arithmetic."""
    device = context.device
    size = device.count if device.module is not None else 2
    if size < 2:
        yield HealthFinding("ok", f"one {device.kind} device: there is nothing to reduce over")
        return

    # the ranks meet and sum; each leaves its answer, or its last words, in a folder
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="doctor-ranks-") as folder:
        codes = _run(device.kind, size, Path(folder))
        reports = [_report_of(Path(folder), rank) for rank in range(size)]
        words = [_last_words(Path(folder), rank) for rank in range(size)]

    # a rank that fails keeps the others waiting: one that ended by itself is named before them
    who = f"{size} {device.kind} {'processes' if device.module is None else 'devices'} ({device.backend})"
    failed = [rank for rank, code in enumerate(codes) if code != 0 or reports[rank] is None]
    if failed:
        late = [rank for rank in failed if codes[rank] is None]
        first = next((rank for rank in failed if rank not in late), failed[0])
        how = f"rank {first}: {words[first]}" if first not in late else f"ranks {late} gave no answer in {LIMIT_S:g} s"
        yield HealthFinding("wrong", f"all-reduce over {who} fails: {how}", link_remedy(device.kind))
        return

    # a wrong sum is worse than none: training would go on with it, unnoticed
    wrong = sorted({name for report in reports for name, right in report["sums"].items() if not right})  # type: ignore[index]
    if wrong:
        what = f"all-reduce over {who} is wrong in {', '.join(wrong)}"
        yield HealthFinding("wrong", what, f"do not train on several of them; {link_remedy(device.kind)}")
        return

    # all is well: the slowest rank is the one that training would wait for
    slowest: dict[str, Any] = max(reports, key=lambda report: report["connect_s"])  # type: ignore[index, arg-type]
    rate = min(report["gib_s"] for report in reports)  # type: ignore[index]
    right = ", ".join(slowest["sums"])
    text = f"all-reduce over {who} is right in {right}: {slowest['connect_s']:.1f} s to connect, {rate:.2f} GiB/s"
    yield HealthFinding("ok", f"{text}, {time.monotonic() - start:.1f} s in all")


def _run(kind: str, size: int, folder: Path) -> list[int | None]:
    """Start the ranks and wait; None for one that had to be stopped."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    # every rank has the environment that a launcher would give it, and none of torchrun's own variables
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_LAUNCHER)}
    processes = []
    with contextlib.ExitStack() as stack:
        for rank in range(size):
            env = {
                **inherited, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            out, err = (stack.enter_context((folder / f"{rank}.{name}").open("wb")) for name in ("out", "err"))
            command = [sys.executable, "-m", "difftrain.cli.doctor.rank", kind]
            processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL))

        # the limit holds for all together, and is short once one has failed
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):  # one has failed: the others are waiting for it
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(0.05)

        # what each came to; those still running are stopped, so that no device stays taken
        codes = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    return codes


def _report_of(folder: Path, rank: int) -> dict[str, Any] | None:
    for line in reversed((folder / f"{rank}.out").read_text(errors="replace").splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            report = json.loads(line)
            if isinstance(report, dict) and "sums" in report:
                return report
    return None


def _last_words(folder: Path, rank: int) -> str:
    lines = (folder / f"{rank}.err").read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
