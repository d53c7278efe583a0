"""One run an output folder: races, dead holders, other machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from difftrain.checkpoint import claim as claims
from difftrain.checkpoint.claim import Claim, Holder, claim_together
from difftrain.contracts import ConfigFault, TrainingFault
from difftrain.testing.threads import on_threads

LIBRARY = str(Path(claims.__file__).parents[2])
START = """
import sys, time
from pathlib import Path
from difftrain.checkpoint.claim import Claim
from difftrain.contracts import ConfigFault
folder, gate, hold = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
print("ready", flush=True)
while not gate.exists():
    pass
try:
    Claim.acquire(folder, "digest")
except ConfigFault as fault:
    print("refused", fault, flush=True)
else:
    print("won", flush=True)
    time.sleep(hold)
"""


def start(folder: Path, gate: Path, hold: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(folder), str(gate), str(hold)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": LIBRARY},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def elsewhere(folder: Path, **changes: object) -> Path:
    """Write a claim as a process of another machine would."""
    holder = asdict(Holder.me("their run", "digest")) | {"host": "node7", "boot": "another", "pid": 4711} | changes
    path = folder / claims.FOLDER / "00000001.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(holder))
    return path


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(claims, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(claims, "LAPSES_S", 1.0)


def test_a_second_run_is_refused_by_name_and_may_come_after(tmp_path):
    with Claim.acquire(tmp_path, "digest"), pytest.raises(ConfigFault) as caught:
        Claim.acquire(tmp_path, "digest")
    assert re.search(rf"{tmp_path} .*: process {os.getpid()} on ", str(caught.value))
    assert caught.value.exit_code == 2
    Claim.acquire(tmp_path, "digest").release()
    assert len(list((tmp_path / claims.FOLDER).iterdir())) == 1


@pytest.mark.parametrize("before", ["nothing", "released", "killed"])
def test_of_starters_at_once_exactly_one_wins(tmp_path, before):
    folder, gate = tmp_path / "out", tmp_path / "gate"
    if before == "released":
        Claim.acquire(folder, "digest").release()
    elif before == "killed":
        gate.touch()
        process = start(folder, gate, 60)
        assert process.stdout.readline() == "won\n"
        process.kill()
        process.wait()
        gate.unlink()
    processes = [start(folder, gate, 8) for _ in range(4)]
    gate.touch()
    answers = sorted(process.stdout.readline() for process in processes)
    assert [answer.split()[0] for answer in answers] == ["refused", "refused", "refused", "won"], answers
    for process in processes:
        process.terminate()
        process.wait()


def test_a_killed_run_of_this_machine_is_followed_at_once(tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    process = start(tmp_path / "out", gate, 60)
    assert process.stdout.readline() == "won\n"
    with pytest.raises(ConfigFault, match=f"process {process.pid} on"):
        Claim.acquire(tmp_path / "out")
    process.kill()  # not waited for: a zombie is gone as well
    time.sleep(0.2)
    said: list[str] = []
    begun = time.monotonic()
    claim = Claim.acquire(tmp_path / "out", log=said.append)
    assert time.monotonic() - begun < 1 and f"process {process.pid} on" in said[0] and "is gone" in said[0]
    claim.release()
    process.wait()


def test_a_pid_that_came_again_is_another_process(tmp_path):
    elsewhere(tmp_path, **{k: getattr(Holder.me("", ""), k) for k in ("boot", "pid")}, pid_start="1")
    Claim.acquire(tmp_path).release()


def test_a_starter_that_was_slow_to_decide_steps_back(tmp_path):
    """It saw claim 1 dead, slept, and creates number 2 after number 3 was taken and 2 deleted."""
    folder = elsewhere(tmp_path).parent
    (folder / "00000003.json").write_text(json.dumps(asdict(Holder.me("quicker", ""))))
    assert not claims._create(folder, 2, Holder.me("slow", ""))
    assert sorted(path.name for path in folder.iterdir()) == ["00000001.json", "00000003.json"]


def test_another_machine_that_beats_is_alive(tmp_path, quick):
    path = elsewhere(tmp_path)

    stop = threading.Event()

    def beat():
        while not stop.wait(0.2):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigFault, match="process 4711 on node7"):
            Claim.acquire(tmp_path)
    finally:
        stop.set()
        thread.join()


def test_another_machine_that_fell_silent_is_given_up_after_a_while(tmp_path, quick):
    path = elsewhere(tmp_path)
    begun = time.monotonic()
    claim = Claim.acquire(tmp_path)
    assert 0.7 < time.monotonic() - begun < 5
    claim.release()
    path.parent.joinpath("00000002.json").unlink()
    path.write_text(json.dumps(asdict(Holder.me("r", "d")) | {"boot": "another"}))
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    begun = time.monotonic()
    Claim.acquire(tmp_path).release()
    assert time.monotonic() - begun < 0.7  # silent for long already: nothing to wait for


def test_a_holder_that_was_out_of_sight_learns_that_it_lost(tmp_path, quick):
    claim = Claim.acquire(tmp_path)
    claim.check()
    (tmp_path / claims.FOLDER / "00000002.json").write_text(json.dumps(asdict(Holder.me("other", ""))))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not claim._lost:
        time.sleep(0.05)
    with pytest.raises(TrainingFault, match=r"lost .*output folder .*process"):
        claim.check()
    claim.release()
    assert not json.loads((tmp_path / claims.FOLDER / "00000002.json").read_text())["released"]


def test_ranks_of_one_run_share_a_disk_or_claim_their_own(tmp_path):
    shared = on_threads(4, lambda ranks: claim_together(tmp_path / "shared", "d", ranks), local_size=2)
    assert [claim.owned for claim in shared] == [True, False, False, False]
    apart = on_threads(4, lambda ranks: claim_together(tmp_path / str(ranks.rank // 2), "d", ranks), local_size=2)
    assert [claim.owned for claim in apart] == [True, False, True, False]
    again = on_threads(2, lambda ranks: claim_together(tmp_path / str(ranks.rank), "d", ranks), local_size=1)
    assert all(isinstance(each, ConfigFault) and f"process {os.getpid()} on " in str(each) for each in again)
    for claim in shared + apart:
        claim.release()
    # where one machine's folder is taken, the other's is let go again
    held = Claim.acquire(tmp_path / "1")
    again = on_threads(2, lambda ranks: claim_together(tmp_path / str(ranks.rank), "d", ranks), local_size=1)
    assert all(isinstance(each, ConfigFault) for each in again)
    Claim.acquire(tmp_path / "0").release()
    held.release()


def test_a_folder_that_cannot_be_written_is_a_configuration_fault(tmp_path):
    (tmp_path / "file").write_text("")
    from difftrain.distributed.ranks import Ranks

    with pytest.raises(ConfigFault, match=r"--output_dir: .*Not a directory|--output_dir: .*File exists"):
        claim_together(tmp_path / "file", "d", Ranks())
