"""A whole cache of thirteen pictures, made once a file, and what is done to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cached import ON_DISK, config, count_encoded, make, write_data

from difftrain.cache import encoding


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen pictures."""
    return write_data(tmp_path_factory.mktemp("caching"))


@pytest.fixture(scope="module")
def built(pictures: Path) -> Path:
    """A folder with a whole cache of the pictures."""
    make(config(pictures, pictures / "built", ON_DISK))
    return pictures / "built"


@pytest.fixture
def own(built: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(built, tmp_path / "own"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each call of an encoder gets."""
    found: list[int] = []
    monkeypatch.setattr(encoding, "decoded_batches", encoding.decoded_batches)
    count_encoded(found)
    return found
