"""Scripts of benchmarks/, run as people run them, in forks of a process that has imported torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parents[2]
PASSED = ("PATH", "PYTHONPATH")


def benchmark(name: str, *words: str, cwd: Path) -> tuple[int, str]:
    """Run a benchmark in a fork of a process that has imported torch; return its exit code and what it printed."""
    process = warm.popen(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words],
        cwd=cwd,
        env=warm.SINGLE | {"HF_HUB_OFFLINE": "1"} | {name: os.environ[name] for name in PASSED if name in os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = process.communicate(timeout=600)[0]
    return process.returncode, said
