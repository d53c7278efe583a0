"""What a run encodes, counted."""

from __future__ import annotations

from typing import Any

import pytest

from difftrain.cache import encoding


def encoded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the entries that are encoded from now on, by encoder."""
    counts: dict[str, int] = {}
    commit = encoding._write_batch

    def counted(job: Any, piece: Any, *rest: Any) -> None:
        counts[job.request.name] = counts.get(job.request.name, 0) + int(job.missing[list(piece.rows)].sum())
        commit(job, piece, *rest)

    monkeypatch.setattr(encoding, "_write_batch", counted)
    return counts
