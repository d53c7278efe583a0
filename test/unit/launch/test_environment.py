"""The packages before the first import: what is missing, what is never replaced."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from refusals import names

from difftrain.launch import environment as env


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed distributions, to be filled by the test."""
    found: dict[str, str] = {}
    monkeypatch.setattr(env, "installed", found.get)
    return found


def wanted(tmp_path: Path, text: str, allowed: str = "") -> list[env.Requirement]:
    (tmp_path / "requirements.txt").write_text(text)
    (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = [{allowed}]\n")
    return env.requirements(tmp_path)


def test_requirements_are_read(tmp_path: Path) -> None:
    found = wanted(tmp_path, "# a comment\ntorch==2.13.0\n\nnumpy~=2.4  # why\n-r other.txt\nPillow\n", '"numpy>=1.26"')
    assert [(r.name, r.tested, r.allowed) for r in found] == [
        ("torch", "==2.13.0", "==2.13.0"),
        ("numpy", "~=2.4", ">=1.26"),
        ("Pillow", "", ""),
    ]


def test_the_shipped_files_are_read() -> None:
    found = {r.name: r for r in env.requirements(env.ROOT)}
    assert found["torch"].allowed == ">=2.7" and found["torch"].tested.startswith("==2.")


@pytest.mark.parametrize(
    ("version", "versions", "good"),
    [
        ("1.26.4", ">=1.26", True),
        ("1.25", ">=1.26", False),
        ("1.26", ">=1.26.0", True),
        ("3.0", ">=1.26,<3", False),
        ("2.7.1+cpu", ">=2.7", True),
        ("0.42.3", "~=0.42.1", True),
        ("0.43", "~=0.42.1", False),
        ("2.9", "~=2.4", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("5.0", "", True),
    ],
)
def test_versions(version: str, versions: str, good: bool) -> None:
    assert env.satisfied(version, versions) is good


def test_only_what_is_missing_is_named(tmp_path: Path, versions: dict[str, str]) -> None:
    versions.update({"torch": "2.9.1+cu128", "numpy": "1.20", "Pillow": "11.0"})
    lines = wanted(
        tmp_path,
        "torch==2.13.0\nnumpy~=2.4\npydantic~=2.14\nPillow~=13.0",
        '"torch>=2.7", "numpy>=1.26", "Pillow>=10.3"',
    )
    assert [r.line for r in env.missing(lines)] == ["numpy~=2.4", "pydantic~=2.14"]  # the older torch and Pillow stay


def test_a_torch_that_is_too_old_is_the_first_thing_said(tmp_path: Path, versions: dict[str, str]) -> None:
    versions["torch"] = "2.1.0"
    with pytest.raises(env.EnvironmentUnusable, match=r"needs Python 3\.11 / torch 2\.7, found torch 2\.1\.0"):
        env.missing(wanted(tmp_path, "pydantic>=2.7\ntorch==2.13.0\n"))


def test_untested_versions_are_named(
    tmp_path: Path, versions: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = wanted(tmp_path, "torch==2.13.0\nnumpy~=2.4\n")
    versions.update({"torch": "2.13.0+cpu", "numpy": "2.4.6"})
    env.name_untested(lines)
    assert capsys.readouterr().err == ""
    versions["torch"] = "2.9.1"
    env.name_untested(lines)
    assert names(capsys.readouterr().err, "torch 2.9.1", "tested ==2.13.0")


def test_npu_machines_get_the_adapter_of_their_torch(versions: dict[str, str], tmp_path: Path) -> None:
    lines = wanted(tmp_path, "torch==2.13.0\n")
    assert env.for_npu(lines, present=False) == []
    assert [r.line for r in env.for_npu(lines, present=True)] == ["torch_npu==2.13.0"]
    versions["torch"] = "2.9.0+cpu"
    assert [r.line for r in env.for_npu(lines, present=True)] == ["torch_npu==2.9.0"]


def test_a_long_installation_gives_signs_of_life_and_loses_no_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "SIGN_S", 0.1)
    script = "import time; print('early', flush=True); time.sleep(0.5); print('late'); raise SystemExit(3)"
    code, output = env._with_signs([sys.executable, "-c", script], dict(os.environ), "installing")
    assert (code, output.split()) == (3, ["early", "late"])
    assert 2 <= capfd.readouterr().err.count("installing, ") <= 8
