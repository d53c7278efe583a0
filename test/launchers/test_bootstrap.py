"""A bare Python: the launchers' .venv, made for real from wheels of a local folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "launching" / "environment.py"


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a package of one empty module as a wheel."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing but the bootstrap and a requirement that no machine has."""
    place = tmp_path / "repo" / "test" / "launching"
    place.mkdir(parents=True)
    shutil.copy(SOURCE, place)
    (tmp_path / "repo" / "requirements.txt").write_text("torch==2.13.0\ndifftrain_probe>=1.0\n")
    (tmp_path / "repo" / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2.7"]\n')
    wheel(tmp_path / "wheels", "difftrain_probe", "1.2")
    return tmp_path / "repo"


def bootstrap(checkout: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    script = checkout / "test" / "launching" / "environment.py"
    return subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True)


def test_a_venv_is_made_once_and_keeps_the_torch_below_it(checkout: Path) -> None:
    wheels = checkout.parent / "wheels"
    first = bootstrap(checkout, wheels)
    python = Path(first.stdout.strip())
    assert first.returncode == 0 and python.parts[-3:] == (".venv", "bin", "python"), first.stderr
    assert "installing difftrain_probe>=1.0" in first.stderr and "Collecting" not in first.stderr
    ask = "import difftrain_probe, torch, sys; print(torch.__file__)"
    torch_file = subprocess.check_output([python, "-c", ask], text=True).strip()
    assert not torch_file.startswith(str(checkout))
    again = bootstrap(checkout, wheels)
    assert again.stdout == first.stdout and "installing" not in again.stderr


def test_pip_is_quoted_where_it_fails(checkout: Path) -> None:
    (checkout.parent / "wheels" / "difftrain_probe-1.2-py3-none-any.whl").unlink()
    done = bootstrap(checkout, checkout.parent / "wheels")
    assert done.returncode == 2 and done.stdout == ""
    assert "No matching distribution" in done.stderr and "pip could not install what is missing" in done.stderr


def test_shell_names_the_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.9.2 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    launcher = SOURCE.parents[1] / "pretrain_full_1m_1p_sdxl.sh"
    done = subprocess.run(
        ["bash", str(launcher)], env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("needs Python 3.11 / torch 2.7, found Python 3.9.2")
