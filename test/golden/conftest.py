"""Fixtures of the golden tests, and the flag that renews the committed figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from doors import Door, write_pictures


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # other tiers have the same flag, where several are run at once
        parser.addoption(
            "--update-golden", action="store_true", help="write test/golden/data anew; say why in the commit"
        )


@pytest.fixture(autouse=True, scope="session")
def warm_processes() -> Iterator[None]:
    """Fork the doors from a process that has imported what they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Door, "popen", staticmethod(warm.popen))
        yield


@pytest.fixture(scope="session")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    """The door over ten captioned pictures that are the same on every machine."""
    pictures = write_pictures(tmp_path_factory.mktemp("pictures"))
    return Door(pictures, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether to write the figures instead of comparing with them."""
    return request.config.getoption("--update-golden")


@pytest.fixture
def golden_dir() -> Path:
    """The folder of the committed figures."""
    return Path(__file__).parent / "data"
