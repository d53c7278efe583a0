"""metrics.jsonl, validation.jsonl and evaluation.jsonl: a line a step, each step once, whatever was killed in between."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftrain.io.files import atomic_write
from difftrain.report.line import exact_json

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
EVALUATION = "evaluation.jsonl"
MOST_STEPS = 10**12  # a larger number of a step is damage


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a line torn by a crash (only the last can be) and a missing file are no error."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                record = json.loads(raw)
            except ValueError:  # a cut multi-byte character is one, too
                continue
            if isinstance(record, dict):
                yield record


def step_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines that tell of a step, in order, each value a number, a table of numbers or None.

    Of a step that stands twice the later line counts; what somebody has damaged is left out.
    """
    records = {record["step"]: record for record in read_lines(path) if is_step(record)}
    return [{key: _numbers(value) for key, value in records[step].items()} for step in sorted(records)]


def is_step(record: dict[str, Any]) -> bool:
    """Tell whether a line is of a step with a loss, which may be no number."""
    step, loss = record.get("step"), record.get("step_loss", "")
    if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= MOST_STEPS:
        return False
    return loss is None or (isinstance(loss, int | float) and not isinstance(loss, bool))


def number(value: Any) -> float | None:
    """Return a finite number as a float; nothing of anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: number(item) for key, item in value.items()}
    return None if number(value) is None else value


class JsonLines:
    """Append records to a file, each on disk's way (out of this process) before the call returns.

    Opening it at a step cuts what lies beyond: those steps are made again. The cut file is written aside and renamed,
    so that a crash meanwhile leaves one of the two.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        """Open for writing. resume_step: the last step that is kept; 0 keeps none."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        known = read_lines(path) if resume_step else ()  # what came before the first step is made again, too
        kept = {r["step"]: r for r in known if isinstance(r.get("step"), int) and r["step"] <= resume_step}
        with atomic_write(path) as file:
            file.writelines(f"{exact_json(kept[step])}\n".encode() for step in sorted(kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; kill -9 afterwards loses nothing of it."""
        self._file.write(exact_json(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to the disk and close."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
