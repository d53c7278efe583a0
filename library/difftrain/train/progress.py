"""Counters of a run: where it is, what it has seen. Part of every checkpoint, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROGRESS_FILE = "progress.json"


@dataclass
class Progress:
    """Count optimizer steps and images.

    step: updates done, 0 before the first. skipped_in_a_row: non-finite updates up to now, without a good one between.
    losses: state of the averaged loss, in the words of report/.
    """

    step: int = 0
    samples_seen: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    losses: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write progress.json into a checkpoint folder."""
        path = folder / PROGRESS_FILE
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def of(cls, text: str) -> Progress:
        """Read what `write` wrote."""
        return cls(**json.loads(text))
