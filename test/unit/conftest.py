"""What holds for unit tests: none waits for a disk, and only those that say so start processes to read images."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from looking import run_here

from difftrain.data.index import build


def _is_open(file: Any) -> None:
    """Stand for fsync: of a file that is not open it is an error, as there."""
    os.fstat(file if isinstance(file, int) else file.fileno())


@pytest.fixture(autouse=True, scope="session")
def no_disk() -> Iterator[None]:
    """Leave syncs out: thousands of them, which only a machine that loses its power would notice."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                patched.setattr(os, name, _is_open)
        yield


@pytest.fixture(autouse=True)
def no_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build indexes in this process, unless a test is marked `workers`."""
    if request.node.get_closest_marker("workers") is None:
        monkeypatch.setattr(build, "run_jobs", run_here)
