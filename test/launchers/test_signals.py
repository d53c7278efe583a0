"""Signals to the process that starts the ranks, with a script of a few lines as the rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doors import family_of
from ports import listens_at

from difftrain.distributed.loopback import is_loopback

WORKERS = Path(__file__).resolve().parents[2] / "library" / "difftrain" / "launch" / "workers.py"
# Begins late, then saves for seconds when it is stopped, and notes what it was sent.
RANK = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
(here / "born").write_text(str(os.getpid()))
time.sleep(2)
def stop(number, frame):
    time.sleep(float(sys.argv[2]))
    (here / "saved").touch()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, lambda *_: (here / "usr1").touch())
(here / "listening").touch()
while not (here / "enough").exists():
    time.sleep(0.05)
"""


class Job:
    """workers.py over one rank, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, None
        (folder / "rank.py").write_text(RANK)

    def start(self, *torchrun: str, saves_for: float | str = 0) -> subprocess.Popen[str]:
        words = [*(torchrun or ("--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local_addr=127.0.0.1")),
                 "--nproc_per_node=1", str(self.folder / "rank.py"), str(self.folder), str(saves_for)]  # fmt: skip
        environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        environ |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(WORKERS), str(self.folder / "log"), "digest", json.dumps(words)]
        self.process = subprocess.Popen(
            command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        return self.process

    def wait_for(self, name: str) -> None:
        until(lambda: (self.folder / name).exists())

    def born(self) -> int:
        until(lambda: (self.folder / "born").exists() and (self.folder / "born").read_text() != "")
        return int((self.folder / "born").read_text())


def until(happens: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    (tmp_path / "enough").touch()
    if job.process is not None and job.process.poll() is None:
        job.process.kill()


def test_saving_may_take_longer_than_torchrun_would_wait(job: Job) -> None:
    process = job.start(saves_for=3)
    job.wait_for("listening")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert (job.folder / "saved").exists() and "Traceback" not in text


def test_the_launcher_of_one_machine_listens_on_the_loopback_alone(job: Job) -> None:
    process = job.start()
    job.wait_for("listening")
    found = listens_at(*family_of(process.pid))
    assert found and all(is_loopback(address) for address in found), found


def test_usr1_reaches_ranks_that_listen_and_harms_nobody_before(job: Job) -> None:
    process = job.start()
    until(lambda: (job.folder / "log").exists())
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)  # tee is the only child
    job.born()
    process.send_signal(signal.SIGUSR1)  # it would end a rank that has no handler yet
    job.wait_for("listening")
    assert not (job.folder / "usr1").exists()
    process.send_signal(signal.SIGUSR1)
    job.wait_for("usr1")
    (job.folder / "enough").touch()
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert text.count("SIGUSR1: nothing to ") == 2
    assert (job.folder / "log").read_text() == text
    assert json.loads((job.folder / "launch.json").read_text())["finished"]


def test_a_stop_while_other_machines_are_awaited(job: Job) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = job.start("--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={port}")

    def waits() -> bool:
        with socket.socket() as store:
            return store.connect_ex(("127.0.0.1", port)) == 0

    until(waits)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT, text
    assert "stopped by SIGINT: no rank" in text and "Traceback" not in text
    assert not (job.folder / "born").exists()


def test_a_machine_that_never_comes_ends_the_wait(job: Job) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    limit = "--rdzv_conf=timeout=1"
    process = job.start("--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={port}", limit)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1, text
    assert text.count("machine 1 of 2") == 2 and text.count(f"127.0.0.1:{port}") == 2 and "--ddp_timeout" in text
    assert "Traceback" not in text and not (job.folder / "born").exists()
    assert (job.folder / "log").read_text() == text


def test_a_port_of_another_job_is_named(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = job.start("--nnodes=1", "--node_rank=0", "--master_addr=localhost", f"--master_port={port}")
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 2, text
    assert "--master_port" in text and str(port) in text and "Traceback" not in text
    assert not (job.folder / "born").exists()


def test_ranks_do_not_outlive_a_launcher_that_is_killed(job: Job) -> None:
    process = job.start()
    rank = job.born()
    job.wait_for("listening")
    process.kill()
    job.wait_for("saved")
    until(lambda: not Path(f"/proc/{rank}").exists())


# Ends as it is told, the first time by SIGKILL where it is to be started again.
FAILING = """
import os, pathlib, signal, sys
here, how = pathlib.Path(sys.argv[1]), sys.argv[2]
with (here / "starts").open("a") as starts:
    starts.write("x")
if how == "killed" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(0 if how == "killed" else int(how))
"""


@pytest.mark.parametrize(("how", "code", "starts"), [("killed", 0, 2), ("75", 75, 1), ("2", 2, 1), ("3", 3, 3)])
def test_ranks_start_again_where_that_may_help(job: Job, how: str, code: int, starts: int) -> None:
    """Not after a wrong flag, nor after a notice of pre-emption."""
    (job.folder / "rank.py").write_text(FAILING)
    words = (
        "--nnodes=1",
        "--max_restarts=2",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
        "--local_addr=127.0.0.1",
    )
    process = job.start(*words, saves_for=how)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == code, text
    assert len((job.folder / "starts").read_text()) == starts, text
    assert [f"({number} of 2)" in text for number in (1, 2)] == [starts > 1, starts > 2] and "Traceback" not in text
    assert ("by SIGKILL" in text) is (how == "killed")
    assert ("pre-emption" in text) is (code == 75)
