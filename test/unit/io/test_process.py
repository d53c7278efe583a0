"""What a launcher is known by."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from difftrain.io.process import boot_id, launcher, start_of

ASK = "from difftrain.io.process import launcher; print(launcher())"
RANK = {"TORCHELASTIC_RUN_ID": "none"}


def asked(*before: str, **env: str) -> str:
    words = [*before, sys.executable, "-c", ASK]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_ranks_of_one_launcher_know_it_and_others_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher() == asked() == ""
    first, again = asked(**RANK), asked(**RANK)
    assert first and first == again  # this process is what started both
    assert asked("bash", "-c", 'out=$("$@"); echo $out', "-", **RANK) == first  # with a script between
    between = [sys.executable, "-c", "import os, subprocess, sys; os.environ['TORCHELASTIC_RUN_ID'] = 'none'; "
               "sys.exit(subprocess.call(sys.argv[1:]))"]  # fmt: skip
    assert asked(*between) not in ("", first)


def test_a_process_is_its_number_and_its_start() -> None:
    assert start_of(os.getpid()) == start_of(os.getpid()) != ""
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert start_of(ended.pid) == "" and boot_id()
