"""A checkout of its own for the launchers, so that nothing of the user's test/output is touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from doors import write_pictures
from launched import Launchers

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("library", "sd_scripts_xl", "third_patch", "requirements.txt", "pyproject.toml")


@pytest.fixture(scope="session")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    """The launchers of a fresh checkout."""
    root = tmp_path_factory.mktemp("checkout")
    for name in NEEDED:
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        (shutil.copytree(source, root / name, ignore=ignore) if source.is_dir() else shutil.copy(source, root / name))
    (root / "test").mkdir()
    shutil.copytree(
        ROOT / "test" / "launching", root / "test" / "launching", ignore=shutil.ignore_patterns("__pycache__")
    )
    for script in (ROOT / "test").glob("*.sh"):
        shutil.copy(script, root / "test")
    return Launchers(root, tmp_path_factory.mktemp("cache"), write_pictures(tmp_path_factory.mktemp("pictures")))
