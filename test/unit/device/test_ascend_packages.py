"""device.extras: Ascend's optional packages are told from their namesakes, and never imported to find out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from difftrain.device import ascend


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def package(place: Path, name: str, *files: str) -> None:
    for file in ("__init__.py", *files):
        path = place / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n")


def test_none_of_them_is_here() -> None:
    assert not ascend.found_apex() and not ascend.found_torchvision_npu()
    assert ascend.version("torchvision_npu") is None and ascend.version("torch") is not None


def test_apex_of_nvidia_is_not_ascends(place: Path) -> None:
    package(place, "apex", "optimizers/fused_adam.py")
    assert not ascend.found_apex()


def test_apex_of_ascend(place: Path) -> None:
    package(place, "apex", "optimizers/npu_fused_adamw.py")
    assert ascend.found_apex() and "apex" not in sys.modules


def test_torchvision_npu_needs_torchvision(place: Path) -> None:
    package(place, "torchvision_npu", "io/_image.py")
    assert not ascend.found_torchvision_npu()
    package(place, "torchvision")
    assert ascend.found_torchvision_npu() and "torchvision_npu" not in sys.modules


def test_torchvision_npu_that_reads_files_only(place: Path) -> None:
    package(place, "torchvision")
    package(place, "torchvision_npu")
    assert not ascend.found_torchvision_npu()
