"""What a run encodes, counted."""

from __future__ import annotations

from typing import Any

import pytest

from difftrain.train import encoding


def encoded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the entries that are encoded from now on, by encoder."""
    counts: dict[str, int] = {}
    commit = encoding._commit

    def counted(job: Any, piece: Any, *rest: Any) -> None:
        counts[job.wish.name] = counts.get(job.wish.name, 0) + int(job.missing[list(piece.rows)].sum())
        commit(job, piece, *rest)

    monkeypatch.setattr(encoding, "_commit", counted)
    return counts
