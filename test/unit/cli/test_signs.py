"""Commands that load much before they print: a sign of life on the error stream, and nothing more on the other."""

from __future__ import annotations

import importlib
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from difftrain.cli import main
from difftrain.cli.words import alive
from difftrain.report import progress

COMMANDS = {
    "export": ["--init_from_config=tiny", "--output=x"],
    "init": ["sd3_light", "--size=tiny", "--output=x"],
    "generate": ["--weights=w", "--prompt=p", "--output=o.png"],
    "dataset": ["inspect", "--output=x.html", "--train_data_dir=.", "--resolution=64,64"],
}


@pytest.fixture(autouse=True)
def just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has begun now, and what is silence is short."""
    monkeypatch.setattr(progress.SIGNS, "_heard_at", time.monotonic())
    monkeypatch.setattr(progress.SIGNS, "_limit_s", 0.1)
    monkeypatch.setattr(progress, "_LOOK_S", 0.02)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_takes_long_says_what_it_does(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*_: Any) -> int:
        time.sleep(0.5)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module(f"difftrain.cli.{command}"), "work", slow)
    assert main([command, *COMMANDS[command]]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"difftrain {command}") and "PyTorch" in printed.err


def test_what_is_logged_counts_as_heard(capsys: pytest.CaptureFixture[str]) -> None:
    def talks() -> int:
        for _ in range(10):
            time.sleep(0.03)
            logging.getLogger("difftrain").error("at work")
        return 3

    assert alive("difftrain x", talks)() == 3
    assert "difftrain x" not in capsys.readouterr().err
    assert progress.SIGNS._log is None and not progress.SIGNS._doing
