"""Run folders as a run leaves them on disk, for the page of runs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from PIL import Image

from difftrain.checkpoint.claim import Holder

LINES = 30


def line(step: int, **other: Any) -> str:
    numbers = {"epoch": 1, "step_loss": 0.25, "avr_loss": 0.3, "step_s": 2.0, "fps": 8.5, "skipped": 0}
    return json.dumps({"step": step, **numbers, **other}) + "\n"


def run_folder(folder: Path, *, outcome: str = "running", alive: bool = True, naming: str = "steps") -> Path:
    """Write a run of 100 steps, 30 of them done. alive: this process holds it, else one that has ended."""
    (folder / ".claim").mkdir(parents=True)
    holder = Holder.me("run", "digest")
    holder = holder if alive else replace(holder, pid_start="1")
    (folder / ".claim" / "00000002.json").write_text(json.dumps(asdict(holder)))
    session = {"session": 1, "outcome": outcome, "from_step": 0, "steps_done": 0, "elapsed_s": 1.0}
    (folder / "sessions.json").write_text(json.dumps({"run_id": "r", "sessions": [session]}))
    (folder / "run.json").write_text(json.dumps({"total_steps": 100, "naming": naming}))
    (folder / "metrics.jsonl").write_text("".join(line(step) for step in range(1, LINES + 1)))
    (folder / "console.log").write_text(
        "step=29\nstep=30 \x1b[31mred\x1b[0m <script>document.title = 'taken'</script>\n"
    )
    (folder / "sample").mkdir()
    Image.new("RGB", (64, 32), (200, 30, 30)).save(folder / "sample" / "grid_000030.png")
    return folder


def older(path: Path, seconds: float) -> None:
    """Date a file back."""
    when = path.stat().st_mtime - seconds
    os.utime(path, (when, when))
