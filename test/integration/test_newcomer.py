"""The script that times the newcomer's path: when a command prints, how long it is silent, and what it left."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def newcomer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("newcomer", ROOT / "benchmarks" / "newcomer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_times_of_what_a_command_prints(newcomer: ModuleType, tmp_path: Path) -> None:
    script = "sleep 0.2; echo first; echo second; sleep 0.6; printf '\\033[1mthird\\033[0m\\n'; test -t 1"
    run = newcomer.watch("x", ["bash", "-c", script], tmp_path, dict(os.environ), tmp_path / "log")
    assert run.code == 0 and run.misses() == []
    assert 0.2 <= run.first_s < run.seconds and 0.5 <= run.silent_s < run.seconds
    assert run.silent_after == "second" and b"third" in (tmp_path / "log").read_bytes()


def test_a_command_that_fails_or_says_nothing(
    newcomer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomer, "FIRST_S", 0.1)
    monkeypatch.setattr(newcomer, "SILENT_S", 0.1)
    run = newcomer.watch("x", ["bash", "-c", "sleep 0.3; exit 3"], tmp_path, dict(os.environ), tmp_path / "log")
    assert run.code == 3 and len(run.misses()) == 3


def test_a_command_that_never_ends_is_ended(
    newcomer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomer, "GIVE_UP_S", 0.3)
    run = newcomer.watch("x", ["sleep", "900"], tmp_path, dict(os.environ), tmp_path / "log")
    assert run.code == -signal.SIGKILL and run.misses()


def test_photos_are_images_with_captions(newcomer: ModuleType, tmp_path: Path) -> None:
    folder = newcomer.draw_photos(tmp_path / "photos")
    sizes = set()
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            image.load()
            sizes.add(image.size)
        assert path.with_suffix(".txt").read_text().strip()
    assert sizes == set(newcomer.SIZES) and len(list(folder.glob("*.png"))) == newcomer.PHOTOS
