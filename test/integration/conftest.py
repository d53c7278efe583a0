"""Fixtures of the integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm
from doors import Door, write_pictures

from difftrain.testing import spawn

spawn.start = warm.popen


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
