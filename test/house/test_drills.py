"""The drills see what they are there for: growth of each kind, and hostile input that fell short."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from drills import failures, hostile
from drills.endurance import LIMITS, reading, trend

STEPS = list(range(1, 5001, 4))


@pytest.mark.parametrize("name", LIMITS)
def test_growth_is_seen_through_noise_and_peaks(name: str) -> None:
    chance = random.Random(3)
    noise = [LIMITS[name].on_the_whole * chance.uniform(-0.4, 0.4) for _ in STEPS]
    peaks = [200.0 if step % 125 < 8 else 0.0 for step in STEPS]  # while it saves and samples
    flat = [100 + more + peak for more, peak in zip(noise, peaks)]
    assert not trend(name, STEPS, flat).grows
    # what caches take at the start is no growth
    assert not trend(name, STEPS, [value - (300 if step < 900 else 0) for step, value in zip(STEPS, flat)]).grows
    leak = 3 * max(LIMITS[name].a_thousand, LIMITS[name].on_the_whole / 4)
    assert trend(name, STEPS, [value + leak * step / 1000 for step, value in zip(STEPS, flat)]).grows


def test_too_few_readings_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="bins"):
        trend("memory", [1, 2, 3], [1.0, 1.0, 1.0])


_HOLDS = """
import os, sys, threading, time
if sys.argv[1] == "much":
    kept = [open("/dev/null") for _ in range(7)], bytearray(os.urandom(1 << 20) * 24)
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    shared = open(f"/dev/shm/difftrain-test-{os.getpid()}", "w+b")
    os.unlink(shared.name)
    shared.truncate(4 << 20)
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_process_holds_is_read() -> None:
    held = []
    for amount in ("little", "much"):
        process = subprocess.Popen([sys.executable, "-c", _HOLDS, amount], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            held.append(reading(process.pid))
        finally:
            process.kill()
            process.communicate()
    more = {name: held[1][name] - held[0][name] for name in LIMITS}
    assert more["descriptors"] == 8 and more["threads"] == 3 and more["shared memory"] == 4
    assert 20 < more["memory"] < 32
    assert reading(os.getpid())["threads"] >= threading.active_count()


def test_hostile_input_that_fell_short_ends_the_drill_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = Counter(refused=3, used=1)
    monkeypatch.setattr(hostile, "DRILLS", {"files": lambda args: outcomes})
    assert hostile.main([]) == 0
    for outcome in ("traceback", "no end", "silent", "CODE RAN"):
        outcomes[outcome] = 1
        assert hostile.main([]) == 1
        del outcomes[outcome]
    outcomes.clear()
    assert hostile.main([]) == 1  # nothing was tried


def test_the_nightly_script_runs_every_drill_that_asserts() -> None:
    script = (Path(__file__).parents[1] / "nightly.sh").read_text()
    assert all(
        f"test/drills/{name}.py" in script
        for name in ("hostile", "endurance", "random_kills", "failures", "planted_faults")
    )


def test_every_event_happens_at_every_moment_on_every_topology() -> None:
    rounds = [failures.drawn_round(number, 0, []) for number in range(3000)]
    assert {(topology.name, event) for topology, event, *_ in rounds} >= {
        (topology.name, event)
        for topology in failures.topologies()
        for event in failures.EVENTS
        if topology.ranks > 1 or event != "freeze_rank"
    }
    assert len({(event, moment) for _, event, moment, _ in rounds}) == 5 * len(failures.EVENTS)
    again = failures.drawn_round(17, 0, [])
    assert again[:3] == rounds[17][:3] and again[3].random() == failures.drawn_round(17, 0, [])[3].random()
