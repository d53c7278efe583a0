"""Reading images in the process of a test: a worker's interpreter takes longer to start than it reads a few of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from difftrain.data.index import build
from difftrain.data.index.inspection import inspect
from difftrain.data.index.worker_pool import PoolJob


class NoLimit:
    """In place of what a worker process tells of the item in hand."""

    @staticmethod
    @contextmanager
    def item(position: int) -> Iterator[None]:
        """Let it take as long as it takes."""
        yield


def run_here(jobs: Iterable[PoolJob], *args: Any, **more: Any) -> Iterator[list[Any]]:
    """Do in this process what worker_pool.run_jobs has others do for an index."""
    for job in jobs:
        yield [row for _, row in inspect(job, NoLimit())]  # type: ignore[arg-type]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let indexes be built here."""
    monkeypatch.setattr(build, "run_jobs", run_here)


@pytest.fixture(name="looked")
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Look at files in this process; return their paths, as it goes on."""
    found: list[str] = []

    def noted(jobs: Iterable[PoolJob], *args: Any, **more: Any) -> Iterator[list[Any]]:
        for job in jobs:
            found.extend(f"{job.payload.source.root}/{file.path}" for _, file in job.payload.files)
            yield from run_here([job])

    monkeypatch.setattr(build, "run_jobs", noted)
    return found
