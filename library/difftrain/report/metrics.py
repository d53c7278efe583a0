"""metrics.jsonl, validation.jsonl and evaluation.jsonl: a line a step, each step once, whatever was killed in between."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftrain.io.files import atomic_write
from difftrain.report.line import exact_json

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
EVALUATION = "evaluation.jsonl"


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
