"""What holds for unit tests: none waits for a disk."""

import os
from collections.abc import Iterator
from typing import Any

import pytest


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
