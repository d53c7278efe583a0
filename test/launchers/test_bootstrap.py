"""A bare Python: the launchers' .venv, made for real from wheels of a local folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from difftrain.launch import claim

SOURCE = Path(__file__).resolve().parents[2] / "library" / "difftrain" / "launch" / "environment.py"


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
    place = tmp_path / "repo" / "library" / "difftrain" / "launch"
    place.mkdir(parents=True)
    for name in ("../__init__.py", "__init__.py", "environment.py", "claim.py"):
        shutil.copy(SOURCE.parent / name, place / name)
    (tmp_path / "repo" / "requirements.txt").write_text("torch==2.13.0\ndifftrain_probe>=1.0\n")
    (tmp_path / "repo" / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2.7"]\n')
    wheel(tmp_path / "wheels", "difftrain_probe", "1.2")
    return tmp_path / "repo"


def start(checkout: Path, wheels: Path) -> subprocess.Popen[str]:
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    script = checkout / "library" / "difftrain" / "launch" / "environment.py"
    return subprocess.Popen(
        [sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def bootstrap(checkout: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    process = start(checkout, wheels)
    said = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


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
    assert not list(checkout.glob(".venv-unfinished*"))


def test_a_venv_whose_making_was_killed_is_made_again_by_one_of_two(checkout: Path) -> None:
    wheels = checkout.parent / "wheels"
    killed = start(checkout, wheels)
    deadline = time.monotonic() + 60
    while not (checkout / ".venv" / "bin" / "python").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    (checkout / ".venv" / "half").touch()
    both = [start(checkout, wheels), start(checkout, wheels)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0] and not (checkout / ".venv" / "half").exists()
    errors = said[0][1] + said[1][1]
    assert errors.count(f"process {killed.pid} on") >= 1 and errors.count("starting over") == 1
    assert errors.count("making ") == 1 and errors.count("installing ") == 1
    assert re.search(rf"waiting .*process ({both[0].pid}|{both[1].pid}) on ", errors)
    subprocess.run([said[0][0].strip(), "-c", "import difftrain_probe"], check=True)
    assert not list(checkout.glob(".venv-unfinished*"))


def signed(folder: Path, mark: str) -> None:
    folder.mkdir()
    (folder / "owner").write_text(mark)


def test_a_silent_owner_elsewhere_is_replaced_and_a_lively_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "SILENT_S", 1.0)
    monkeypatch.setattr(claim, "BEAT_S", 0.2)
    folder, heard = tmp_path / "claim", []
    signed(folder, "token 1 elsewhere/boot/space")
    began = time.monotonic()
    with claim.turn(folder, heard.append, fails_whole=ValueError) as first:
        assert first.left_behind and time.monotonic() - began >= 1.0
        assert re.match("waiting .*process 1 on elsewhere", heard[0])
        monkeypatch.setattr(claim, "_here", lambda: "another machine")
        with ThreadPoolExecutor() as pool:
            second = pool.submit(take_turn, folder)
            time.sleep(2.5)
            assert not second.done()
            first.release()
            assert not second.result(timeout=10)
    assert not list(tmp_path.iterdir())


def take_turn(folder: Path) -> bool:
    with claim.turn(folder, print, fails_whole=ValueError) as mine:
        return mine.left_behind


def test_of_several_who_find_an_owner_dead_one_follows(tmp_path: Path) -> None:
    signed(tmp_path / "claim", "token 1 elsewhere/boot/space")
    several = [claim.FolderClaim(tmp_path / "claim") for _ in range(5)]
    assert [one.take_over("token") for one in several] == [True, False, False, False, False]
    several[0].release()
    assert not several[1].take_over("token") and several[1].take()
    assert not several[2].take_over("token")  # of an owner who has long been followed
    assert several[1].owner() == claim.FolderClaim(tmp_path / "claim").owner()
    several[1].release()


def test_only_an_error_that_says_so_leaves_nothing_half_made(tmp_path: Path) -> None:
    for error, left in ((ValueError, False), (KeyboardInterrupt, True)):
        with pytest.raises(error), claim.turn(tmp_path / "claim", print, fails_whole=ValueError):
            raise error
        assert (tmp_path / "claim").exists() == left


def test_pip_is_quoted_where_it_fails(checkout: Path) -> None:
    (checkout.parent / "wheels" / "difftrain_probe-1.2-py3-none-any.whl").unlink()
    done = bootstrap(checkout, checkout.parent / "wheels")
    assert done.returncode == 2 and done.stdout == ""
    assert "No matching distribution" in done.stderr and "(exit code " in done.stderr


def test_shell_names_the_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.9.2 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    launcher = SOURCE.parents[3] / "test" / "pretrain_full_1m_1p_sdxl.sh"
    done = subprocess.run(
        ["bash", str(launcher)], env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("needs Python 3.11 / torch 2.7, found Python 3.9.2")
