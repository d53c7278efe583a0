"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from doors import Door, write_pictures

from difftrain.testing import spawn

# handed out first, the longest before others: a long file at the end would keep one of two workers waiting for it
LONGEST = (
    "evaluation_sets", "run_dirs", "cache_runs", "train_door", "sd3_speedups_engines", "configs", "sdxl_contract",
    "engine_accelerate", "sd3_cache", "engine_ddp", "hub_runs", "family_runs", "several_data_sets", "cache_tools",
    "engine_doors", "resume_by_step", "sdxl_bad_input", "cache_guard", "distributed_ranks", "cached_start",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files first; within a file they stay in order."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture(autouse=True, scope="session")
def warm_processes() -> Iterator[None]:
    """Fork the doors, and the ranks of small jobs, from a process that has imported what they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "start_process", warm.popen)
        patch.setattr(Door, "popen", staticmethod(warm.popen))
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
