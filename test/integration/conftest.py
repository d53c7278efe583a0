"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from doors import Door, write_pictures


@pytest.fixture(autouse=True, scope="session")
def warm_processes() -> Iterator[None]:
    """Fork the doors, and the ranks of small jobs, from a process that has imported what they do."""
    with warm.starts_forked():
        yield


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten captioned pictures."""
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def door(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Door:
    """The door with its index cache kept away from the user's."""
    return Door(pictures, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def straight(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract line, run once without interruption."""
    out = tmp_path_factory.mktemp("straight") / "out"
    output = door.run(door.flags(out))
    (out.parent / "console.txt").write_text(output)
    return out
