"""The benchmark of an accelerator is rehearsed where there is none: every check of both families, on tiny sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_measured_on_a_gpu_runs_on_tiny_sizes(tmp_path: Path) -> None:
    words = ["--rehearse", "--models=sd3_light", "--light_batch_sizes=1", "--precisions=bf16", "--steps=1"]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "FAIL" not in ended.stdout and ended.stdout.count("PASS  SD3") == 3
    assert ended.stdout.count("sd3_light bf16 batch   1") == 2 and not list(tmp_path.iterdir())
