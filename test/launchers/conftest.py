"""A checkout of its own for the launchers, so that nothing of the user's test/output is touched."""

from __future__ import annotations

import pytest
from doors import write_pictures
from launched import Launchers, checkout


@pytest.fixture(scope="session")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    """The launchers of a fresh checkout."""
    root = checkout(tmp_path_factory.mktemp("checkout"))
    return Launchers(root, tmp_path_factory.mktemp("cache"), write_pictures(tmp_path_factory.mktemp("pictures")))
