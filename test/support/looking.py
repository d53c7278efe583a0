"""Building an index in the process of a test, which is quicker than in worker processes, and shows what is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from difftrain.data.index import build
from difftrain.data.index.inspection import inspect


class NoLimit:
    """In place of what a worker process tells of the item in hand."""

    @staticmethod
    @contextmanager
    def item(position: int) -> Iterator[None]:
        """Let it take as long as it takes."""
        yield


@pytest.fixture(name="looked")
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Look at files in this process; return their paths, as it goes on."""
    found: list[str] = []

    def run_jobs(jobs: Any, *args: Any, **more: Any) -> Iterator[list[Any]]:
        for job in jobs:
            found.extend(f"{job.payload.source.root}/{file.path}" for _, file in job.payload.files)
            yield [row for _, row in inspect(job, NoLimit())]  # type: ignore[arg-type]

    monkeypatch.setattr(build, "run_jobs", run_jobs)
    return found
