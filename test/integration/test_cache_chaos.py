"""Launches of a feature cache killed at random moments: nothing committed is lost, nothing torn is served."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_twelve_rounds_of_kills_lose_nothing():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cache_chaos.py"), "--rounds=12"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS  0 torn records served, 0 committed records lost" in done.stdout
