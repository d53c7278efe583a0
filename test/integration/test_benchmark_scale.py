"""The scale benchmark's own limits, on 200,000 records: opening, planning, memory of a worker."""

import subprocess
import sys
from pathlib import Path

import pytest
from machine_kind import slowness

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_planning_keeps_its_limits():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--records=200000", f"--slowness={slowness()}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 21 and "FAIL" not in done.stdout
