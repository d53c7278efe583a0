"""Jobs that lose a process and go on by themselves, and jobs that are told in time that their machine goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import DOOR, Door, losses, wait_for, write_pictures
from safetensors.torch import load_file
from warm import HOST

from difftrain.testing.spawn import free_port
from difftrain.train.triggers import PREEMPTED

STEPS = 8
Started = Any


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    root = tmp_path_factory.mktemp("restarts")
    return Door(write_pictures(root / "pictures"), root / "cache")


@pytest.fixture(scope="module")
def unbroken(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on two ranks that nobody has disturbed."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    door.run(door.flags(out, *LINE, batch=1, steps=STEPS), ranks=2)
    return out


LINE = ("--save_every_n_steps=2", "--resume=auto", "--epoch_batches=whole", "--max_data_loader_n_workers=0")


def launchers(door: Door, flags: list[list[str]], *torchrun: str) -> list[Started]:
    """Start a torchrun for each command line: as many machines, of one process or two together."""
    each = 2 // len(flags)
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(flags)}",
        f"--nproc_per_node={each}",
        *torchrun,
    ]
    return [door._start([*words, str(DOOR), *line]) for line in flags]


def ranks_of(launcher: int) -> list[int]:
    """Return the processes that a torchrun has started as ranks, which may be forked from a process beside it."""
    found = []
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        is_host = Path(f"/proc/{pid}/comm").read_text().strip() == HOST
        found += ranks_of(pid) if is_host else [pid]
    return found


def has_done(out: Path, step: int) -> Any:
    return lambda: (out / "metrics.jsonl").exists() and len(losses(out)) >= step


def ended(process: Started, code: int) -> str:
    try:
        text, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        pytest.fail(f"still running:\n{text}")
    assert process.returncode == code, text
    return str(text)


def same_end(left: Path, right: Path) -> None:
    assert losses(left) == losses(right)
    one, other = (load_file(out / "NAME.safetensors") for out in (left, right))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


JUMPING = """
import itertools, runpy, sys, time
true_time, jumps = time.time, itertools.cycle((0, 86400, -172800, 40))
time.time = lambda: true_time() + next(jumps)
runpy.run_path(sys.argv[0].replace("jumping.py", "door.py"), run_name="__main__")
"""


@pytest.mark.nightly
def test_a_clock_that_jumps_changes_nothing(door: Door, unbroken: Path, tmp_path: Path) -> None:
    """Days forth and back from one look to the next: waits, intervals and time-outs are of the monotonic clock."""
    out = tmp_path / "out"
    (tmp_path / "jumping.py").write_text(JUMPING)
    (tmp_path / "door.py").symlink_to(DOOR)
    flags = door.flags(out, *LINE, "--ddp_timeout=1", batch=1, steps=STEPS)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d"]
    text = door.run_words([*words, "--rdzv-endpoint=localhost:0", str(tmp_path / "jumping.py"), *flags])
    same_end(out, unbroken)
    report = json.loads((out / "report.json").read_text())
    assert 0 < report["e2e_this_session_s"] < 1000, report["e2e_this_session_s"]
    assert "rank 0 of" not in text and "rank 1 of" not in text, text  # nobody is missed


@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_torchrun_goes_on_by_itself_after_a_rank_is_killed(
    door: Door, unbroken: Path, tmp_path: Path, machines: int
) -> None:
    outs = [tmp_path / f"node{number}" for number in range(machines)]
    lines = [door.flags(out, *LINE, batch=1, steps=STEPS) for out in outs]
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    jobs = launchers(door, lines, "--max-restarts=2", "--rdzv-backend=c10d", endpoint, "--rdzv-id=job")
    (out,) = wait_for(lambda: [out for out in outs if has_done(out, 3)()])
    pids = [pid for job in jobs for pid in ranks_of(job.pid)]
    os.kill(pids[-1], signal.SIGKILL)
    texts = [ended(job, 0) for job in jobs]
    assert any("resuming from" in text for text in texts), texts
    same_end(out, unbroken)


@pytest.mark.flags("preempt_file")
def test_a_notice_on_one_machine_ends_all_at_one_step_and_the_run_goes_on(
    door: Door, unbroken: Path, tmp_path: Path
) -> None:
    """The file is looked for on each machine, and appears on the second alone."""
    outs, notices = (
        [tmp_path / f"node{number}" for number in (0, 1)],
        [tmp_path / f"notice{number}" for number in (0, 1)],
    )
    lines = [
        door.flags(out, *LINE, f"--preempt_file={notice}", batch=1, steps=STEPS) for out, notice in zip(outs, notices)
    ]
    torchrun = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=job")
    jobs = launchers(door, lines, *torchrun)
    (out,) = wait_for(lambda: [out for out in outs if has_done(out, 3)()])
    notices[1].touch()
    texts = [ended(job, 1) for job in jobs]  # torchrun's own
    done = len(losses(out))
    assert 3 <= done < STEPS
    for text in texts:
        assert f"exitcode  : {PREEMPTED} " in text, text
    assert any(f"stopped by a notice of pre-emption at step {done}" in text for text in texts)

    # one machine is left, and then there is none other: the same global batch on one process
    door.run(door.flags(out, *LINE, batch=2, steps=STEPS), ranks=1)
    assert losses(out)[:done] == losses(unbroken)[:done]
    assert losses(out) == pytest.approx(losses(unbroken), rel=1e-5)
