"""`pip install .` into an environment of its own: the difftrain command works there, and the wheel has every file."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shipped() -> list[str]:
    """Return the files that a wheel must have, by their place in it."""
    done = subprocess.run(
        ["git", "ls-files", "library/difftrain", "third_patch"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("this is no git checkout")
    return [name.removeprefix("library/") for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def call(*words: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, with nothing of this checkout on its path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=cwd, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that no build folder is left in the checkout or found there."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("library", "third_patch", "sd_scripts_xl", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, copy)
    out = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    call(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", *isolation, "-w", out, cwd=copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a fresh environment that sees the packages of this one; return its folder of commands."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    python = home / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_has_every_file(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert not set(shipped()) - inside
    assert not [name for name in inside if name.startswith(("test/", "library/", "sd_scripts_xl/", "benchmarks/"))]
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_the_command_works_where_it_is_installed(scripts: Path, tmp_path: Path) -> None:
    where = call(scripts / "python", "-c", "import difftrain, third_patch; print(difftrain.__file__)", cwd=tmp_path)
    assert str(scripts.parent) in where
    assert "export" in call(scripts / "difftrain", "--help", cwd=tmp_path)
    assert '"$defs"' in call(scripts / "difftrain", "schema", cwd=tmp_path)
    line = [
        "--init_from_config=tiny",
        "--save_model_as=safetensors",
        "--save_precision=fp16",
        "--output=tiny.safetensors",
    ]
    assert call(scripts / "difftrain", "export", "--family=sdxl", *line, cwd=tmp_path).strip() == "tiny.safetensors"
    assert (tmp_path / "tiny.safetensors").stat().st_size > 1_000_000
