"""A checkout of its own for each file of launchers' tests: nobody's test/output is touched, no file's by another."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors import write_pictures
from launched import Launchers, checkout


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The user's cache folder and a folder of pictures, which all files share as all checkouts of a user do."""
    return tmp_path_factory.mktemp("cache"), write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory, kept: tuple[Path, Path]) -> Launchers:
    """The launchers of a fresh checkout."""
    return Launchers(checkout(tmp_path_factory.mktemp("checkout")), *kept)
