"""The wheel alone, in an environment of its own and an empty folder: every file is in it, and it trains."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from doors import Door, write_pictures

ROOT = Path(__file__).parents[2]
IN_THE_WHEEL = {
    "library/difftrain/": "difftrain/",
    "third_patch/": "difftrain/third_patch/",
    "configs/": "difftrain/recipes/",
}
BUILT_FROM = ("library", "third_patch", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def shipped() -> list[str]:
    """Return the files that a wheel must have, by their place in it."""
    done = subprocess.run(["git", "ls-files", *IN_THE_WHEEL], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git checkout")
    files = [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    return [
        inner + name.removeprefix(own) for name in files for own, inner in IN_THE_WHEEL.items() if name.startswith(own)
    ]


def clean(cwd: Path) -> dict[str, str]:
    """Return the variables of a process that has nothing of this checkout on its path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / "user_cache")}


def call(*words: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, with nothing of this checkout on its path."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=cwd, env=clean(cwd))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that no build folder is left in the checkout or found there."""
    copy = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
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
    line = ["--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel]
    call(sys.executable, "-m", "pip", *line, cwd=home)
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_has_every_file_and_one_name(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert not set(shipped()) - inside
    (info,) = {name.partition("/")[0] for name in inside} - {"difftrain"}
    assert info.endswith(".dist-info") and f"{info}/licenses/LICENSE" in inside


def test_it_trains_in_an_empty_folder(scripts: Path, tmp_path: Path) -> None:
    difftrain = scripts / "difftrain"
    assert call(difftrain, "recipes", "copy", "sd3_light/tiny", ".", cwd=tmp_path).strip() == "tiny.toml"
    sizes = ["--training.max_steps=2", "--training.micro_batch_size_per_gpu=2"]
    call(difftrain, "train", "--config", "tiny.toml", *sizes, cwd=tmp_path)
    (run,) = (tmp_path / "output" / "sd3_light" / "tiny" / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and (run / "report.json").is_file()
    assert f"{difftrain} train --config" in json.loads((run / "report.json").read_text())["command"]

    # --- its report anew, and the page of runs, from the folder where training was begun
    (run / "report.html").unlink()
    assert call(difftrain, "report", run, cwd=tmp_path).strip() == str(run / "report.html")
    assert "2 of 2 steps" in (run / "report.html").read_text()
    words = [difftrain, "watch", ".", "--port=0", "--token=T"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=clean(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1 run ")
        address = process.stdout.readline().strip()
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert f"output/sd3_light/tiny/runs/{run.name}" in answer.read().decode()
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


def test_it_trains_sdxl_with_flags(scripts: Path, tmp_path: Path) -> None:
    door = Door(write_pictures(tmp_path / "images", 4), tmp_path)
    call(scripts / "difftrain", "sdxl", *door.flags(tmp_path / "out", steps=2), cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    (checkpoint,) = (tmp_path / "out").glob("NAME-state*")
    assert f"--resume={checkpoint}" in (tmp_path / "out" / "console.log").read_text()
    assert {"NAME.safetensors", "report.html", "report.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_what_it_brings_is_inside_it(scripts: Path, tmp_path: Path) -> None:
    """Patches by their name in a wheel, recipes, the commands of a module, and no checkout in its messages."""
    code = (
        "import sys, difftrain; from difftrain.cli.train import apply_patches; apply_patches('native')\n"
        "from difftrain.third_patch import PATCHES, accelerate_patch, fairscale_patch\n"
        "print(difftrain.__file__, accelerate_patch.PATCH.package, 'third_patch' in sys.modules, 'torch' in sys.modules)"
    )
    where, *facts = call(scripts / "python", "-c", code, cwd=tmp_path).split()
    assert Path(where).is_relative_to(scripts.parent) and facts == ["accelerate", "False", "False"]
    listed = call(scripts / "python", "-m", "difftrain", "recipes", cwd=tmp_path)
    assert len(listed.splitlines()) == len(list((ROOT / "configs").rglob("*.toml"))) - len(data_files())
    done = subprocess.run(
        [scripts / "difftrain", "sdxl", "--config=none"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and "difftrain recipes" in done.stderr and "configs/" not in done.stderr


def data_files() -> list[Path]:
    """Return the files of datasets, which belong to recipes."""
    return [path for path in (ROOT / "configs").rglob("*.toml") if b"[[directory]]" in path.read_bytes()]
