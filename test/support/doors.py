"""Pictures, and the door run as users run it, for tests that start processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DOOR = ROOT / "sd_scripts_xl" / "sdxl_pretrain.py"
KILLED_AT = ROOT / "test" / "support" / "killed_at.py"
SIZES = [(64, 64), (96, 48), (48, 96), (80, 80), (128, 64), (70, 50)]


def write_pictures(folder: Path, count: int = 10) -> Path:
    """Write small captioned pictures of several aspect ratios, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        rng = np.random.Generator(np.random.Philox(i))
        width, height = SIZES[i % len(SIZES)]
        coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{i:03d}.png")
        (folder / f"{i:03d}.txt").write_text(f"picture {i}, soft colours, number {i * i}")
    return folder


class Door:
    """Run sd_scripts_xl/sdxl_pretrain.py in a process of its own."""

    path = DOOR
    popen: Callable[..., Any] = staticmethod(subprocess.Popen)  # a suite may have one that forks

    def __init__(self, data: Path, cache: Path) -> None:
        self.data = data
        self.env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}

    def flags(self, out: Path, *extra: str, batch: int = 2, steps: int = 12, name: str = "NAME") -> list[str]:
        """Return the contract line of the issue with changes."""
        line = [
            "--init_from_config=tiny",
            f"--train_data_dir={self.data}",
            f"--output_dir={out}",
            f"--output_name={name}",
            "--resolution=64,64",
            "--enable_bucket",
            "--min_bucket_reso=32",
            "--max_bucket_reso=128",
            f"--train_batch_size={batch}",
            f"--max_train_steps={steps}",
            "--learning_rate=1e-4",
            "--seed=1",
            "--save_every_n_steps=4",
            "--save_state",
            "--log_every=1",
        ]
        keys = {flag.split("=")[0] for flag in extra}
        return [flag for flag in line if flag.split("=")[0] not in keys] + list(extra)

    def command(self, flags: list[str], ranks: int = 1) -> list[str]:
        """Return the command line, with torchrun in front for several ranks."""
        if ranks == 1:
            return [sys.executable, str(DOOR), *flags]
        run = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=0"]
        return [*run, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(DOOR), *flags]

    def kill_at(self, step: int, flags: list[str], ranks: int = 1) -> None:
        """Run until a step is in the metrics; there the process that writes them is killed, and the job with it."""
        words = self.command(flags, ranks)
        at = words.index(str(DOOR))
        output = self.run_words([*words[:at], str(KILLED_AT), str(step), *words[at:]], expect=None)
        assert "Signal 9" in output or ranks == 1, output

    def start(self, flags: list[str], ranks: int = 1, **env: str) -> subprocess.Popen[str]:
        """Start a run; one thread a process, so that runs can be compared bit by bit."""
        return self._start(self.command(flags, ranks), **env)

    def _start(self, words: list[str], popen: Any = None, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        return (popen or self.popen)(
            words,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.env, **env},
        )

    def run(self, flags: list[str], ranks: int = 1, expect: int | None = 0, timeout: int = 300, **env: str) -> str:
        """Run to the end and return what it printed."""
        return self.run_words(self.command(flags, ranks), expect, timeout, **env)

    def shell(self, script: str, expect: int | None = 0) -> str:
        """Run a line of bash to the end and return what it printed."""
        return self.run_words(["bash", "-c", script], expect)

    def run_words(
        self, words: list[str], expect: int | None = 0, timeout: int = 300, *, cwd: Path | None = None, **env: str
    ) -> str:
        """Run any command to the end, in a folder or in this one, and return what it printed."""
        return self._ended(self._start(words, cwd=cwd, **env), expect, timeout)

    def run_cold(self, words: list[str], expect: int | None = 0, timeout: int = 300) -> str:
        """Run any command in a process that begins with nothing imported."""
        return self._ended(self._start(words, popen=subprocess.Popen), expect, timeout)

    def _ended(self, process: Any, expect: int | None, timeout: int) -> str:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"still running after {timeout} s:\n{output}")
        if expect is not None:
            assert process.returncode == expect, f"exit code {process.returncode}, not {expect}:\n{output}"
        return output


def family_of(pid: int) -> list[int]:
    """Return a process and all that it has started, the nearest first; not what ranks are forked from."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        found = [] if Path(f"/proc/{pid}/comm").read_text().strip() == warm.HOST else [pid]
    except OSError:
        return [pid]
    return [*found, *(each for child in children for each in family_of(child))]


def metrics(out: Path) -> list[dict]:
    """Read metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    """Return the step losses in order."""
    return [line["step_loss"] for line in metrics(out)]


def wait_for(condition, seconds: float = 120.0, message: str = "it never happened"):
    """Wait until a condition gives something true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    pytest.fail(message)
