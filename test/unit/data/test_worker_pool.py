"""Worker processes: an item that hangs or kills its process is lost, and nothing else is."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import difftrain
from difftrain.contracts import DataFault
from difftrain.data.index.worker_pool import PoolJob, run_jobs

HANDLERS = """
import os, signal, time
from difftrain.contracts import DataFault

def act(job, beat):
    for position, word in enumerate(job.payload):
        if position < job.start:
            continue
        if position in job.bad:
            yield position, (word, job.bad[position])
            continue
        with beat.item(position):
            if word == "hang":
                time.sleep(600)
            if word == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if word == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if word == "exit":
                os._exit(3)
        if word == "fault":
            raise DataFault("no column")
        if word == "bug":
            raise ZeroDivisionError("a bug")
        if word == "die outside":
            os._exit(7)
        if word == "slow outside":
            time.sleep(1.5)
        if word == "three slow rows":
            time.sleep(0.6)
            yield position, (word, 1)
            yield position, (word, 2)
        yield position, (word, os.getpid())
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "odd_handlers.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)

    def call(*payloads, workers=2, limit_s=1.0):
        jobs = [PoolJob(payload) for payload in payloads]
        rows = run_jobs(iter(jobs), "odd_handlers:act", workers=workers, limit_s=limit_s)
        return [row for batch in rows for row in batch]

    return call


def test_every_item_is_seen_once_by_several_processes(run):
    rows = run(*[[f"{job}.{i}" for i in range(700)] for job in range(6)])
    assert sorted(word for word, _ in rows) == sorted(f"{job}.{i}" for job in range(6) for i in range(700))
    assert len({pid for _, pid in rows}) == 2 and os.getpid() not in {pid for _, pid in rows}


def test_only_the_bad_items_are_lost(run):
    payload = [str(i) for i in range(600)]
    payload[10], payload[300], payload[301], payload[599] = "hang", "segfault", "exit", "killed"
    rows = dict(run(payload, ["other", "slow outside"], limit_s=1.0))
    assert len(rows) == 602
    assert re.fullmatch("too slow: .* 1 s", rows["hang"])
    assert re.fullmatch("crashed: .* SIGSEGV", rows["segfault"])
    assert re.fullmatch("crashed: .* exit code 3", rows["exit"])
    assert re.fullmatch(r"crashed: .* SIGKILL \(.*memory.*\)", rows["killed"])
    assert sum(isinstance(value, str) for value in rows.values()) == 4  # waiting outside an item has no limit


def test_faults_of_the_data_come_through_and_bugs_with_their_traceback(run):
    with pytest.raises(DataFault, match="no column"):
        run(["a", "fault"])
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug"):
        run(["a", "bug"])
    with pytest.raises(RuntimeError, match="keep dying \\(exit code 7\\)"):
        run(["a", "die outside"])


def test_leaving_early_ends_the_processes(tmp_path, monkeypatch):
    (tmp_path / "odd_handlers.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)
    rows = run_jobs(iter([PoolJob(["a"] * 2000 + ["hang"])]), "odd_handlers:act", workers=1, limit_s=600)
    pid = next(rows)[0][1]
    rows.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_workers_end_when_the_parent_is_killed(tmp_path):
    (tmp_path / "odd_handlers.py").write_text(HANDLERS)
    script = (
        "from difftrain.data.index.worker_pool import PoolJob, run_jobs\n"  # without a main guard, as users write scripts
        "for rows in run_jobs(iter([PoolJob(['a']), PoolJob(['a', 'slow outside'])]), 'odd_handlers:act', workers=1, limit_s=600):\n"
        "    print(rows[0][1], flush=True)\n"
    )
    (tmp_path / "script.py").write_text(script)
    library = Path(difftrain.__file__).parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(library), str(tmp_path)])}
    parent = subprocess.Popen([sys.executable, tmp_path / "script.py"], env=env, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        with contextlib.suppress(OSError):  # it may end in between
            if Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z":
                return  # ended; nobody reaps orphans in some containers
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent")


def test_an_item_of_several_rows_keeps_all_when_the_next_one_dies(run) -> None:
    rows = run(["three slow rows", "exit", "fine"], workers=1, limit_s=5.0)
    assert [word for word, _ in rows] == ["three slow rows"] * 3 + ["exit", "fine"]
