"""The door as a process: quick, without torch, from any folder; errors become messages and exit codes."""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machine_kind import processor_s
from refusals import is_about

from difftrain.config import TrainConfig, door
from difftrain.config.hidden_imports import collect_again
from difftrain.config.parse_flags import Parsed
from difftrain.config.spellings.flags import FLAGS
from difftrain.contracts import ConfigFault, DataFault, Fault, TrainingFault

ROOT = Path(__file__).parents[3]
DOOR = ROOT / "sd_scripts_xl" / "sdxl_pretrain.py"
LIMIT_S = 0.45


def run(*argv: str, cwd: Path, python: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    """Run the door with nothing of the tests on its path."""
    command = [sys.executable, *(python or (str(DOOR),)), *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=clean() | env, timeout=60)


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")}


@pytest.mark.parametrize(
    ("argv", "code"), [(["--help"], 0), (["--sed=1", "--train_batch_size=0"], 2)], ids=["help", "fault"]
)
def test_help_and_faults_answer_within_half_a_second(argv: list[str], code: int, tmp_path: Path) -> None:
    seconds, _ = processor_s([sys.executable, DOOR, *argv], code, cwd=tmp_path, env=clean(), timeout=60)
    assert seconds < LIMIT_S


PROBE = """
import atexit, runpy, sys
heavy = ("torch", "numpy", "diffusers", "transformers", "PIL", "torch_npu")
atexit.register(lambda: print("IMPORTED", [name for name in heavy if name in sys.modules]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("argv", [["--help"], ["--seed=x"], ["--config=none.toml", "--use_ema"]])
def test_help_and_faults_import_no_torch(argv: list[str], tmp_path: Path) -> None:
    done = run(*argv, cwd=tmp_path, python=("-c", PROBE, str(DOOR)))
    assert done.stdout.splitlines()[-1] == "IMPORTED []", done.stdout + done.stderr


def test_help_names_every_flag_once(tmp_path: Path) -> None:
    text = run("--help", cwd=tmp_path).stdout
    for flag in FLAGS.values():
        if flag.status in ("offered", "nearest"):
            starts = re.findall(rf"^  {flag.option}(?![a-z0-9_])", text, flags=re.M)
            assert len(starts) == 1, flag.option
        else:
            assert flag.option in text
    assert max(map(len, text.splitlines())) <= 120


def test_faults_go_to_stderr_without_a_traceback(tmp_path: Path) -> None:
    done = run("--sed=1", "--train_batch_size=0", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    heading, *faults = done.stderr.splitlines()
    assert is_about(heading, "sdxl_pretrain.py", 6, "faults") and len(faults) == 6
    assert is_about(faults[0], "--sed", "--seed") and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_device_that_no_room_knows_is_a_fault_like_others(tmp_path: Path) -> None:
    done = run("--device=gpu", "--seed=x", cwd=tmp_path)
    faults = done.stderr.splitlines()
    assert done.returncode == 2 and any(is_about(fault, "--device", "'gpu'") for fault in faults)
    assert any(is_about(fault, "--seed", "'x'") for fault in faults)


@pytest.mark.parametrize(("module", "package"), [("torch", "torch"), ("PIL", "Pillow")])
def test_a_package_that_is_missing_is_named(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert door.guard("door", lambda: importlib.import_module(module) and 0) == 1
    said = capsys.readouterr().err
    assert is_about(said, "door", package, "pip install -r requirements.txt") and len(said.splitlines()) == 1
    listed = re.split(r"[~=\n]+", (ROOT / "requirements.txt").read_text())
    assert set(door.REQUIRED.values()) <= set(listed)


def test_help_into_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    command = f"{sys.executable} {DOOR} --help | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert not done.stderr


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigFault([Fault("--x", "is wrong", "do y"), Fault("--z", "too")]), 2, "2 faults"),
        (DataFault("no pictures in X"), 2, "no pictures in X"),
        (TrainingFault("disk /x"), 1, "disk /x"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["configuration", "data", "training", "interrupt"],
)
def test_errors_of_users_are_messages(
    alone: None, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    assert door.guard("door", raising(error)) == code
    said = capsys.readouterr().err
    assert is_about(said, "door", says) and "Traceback" not in said


def test_a_bug_shows_its_traceback_and_no_token(
    alone: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-token-of-a-hub")
    assert door.guard("door", raising(ValueError("found a-token-of-a-hub here"))) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said and "ValueError: found *** here" in said


def test_other_ranks_let_the_first_speak(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(door.time, "sleep", waits.append)
    for rank, waited in (("0", 0), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert door.guard("door", raising(ConfigFault([Fault("--x", "is wrong")]))) == 2
        assert len(waits) == waited
    second = capsys.readouterr().err.splitlines()[2]
    assert is_about(second, "door (rank 1)", "1 fault")


def test_notes_are_said_by_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    argv = ["--init_from_config=tiny", f"--train_data_dir={tmp_path / 'data'}", f"--output_dir={tmp_path}"]
    argv += ["--resolution=64", "--xformers"]
    for rank, lines in (("0", 1), ("3", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        seen = []
        assert door.open_door("door", argv, lambda parsed, seen=seen: seen.append(parsed) or 0) == 0
        assert seen[0].config.training.attention == "xformers"
        assert capsys.readouterr().err.count("--xformers") == lines


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_until_the_work_has_imported_what_it_does(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def work(_: object) -> int:
        seen.append(gc.isenabled())
        if fails:
            raise DataFault("no pictures")
        frozen = gc.get_freeze_count()
        collect_again()
        seen.append(gc.isenabled() and gc.get_freeze_count() > frozen)
        collect_again()  # once for each pause
        return 0

    monkeypatch.setattr(door, "hold_back", lambda: None)
    code = door.enter("train.py", [], lambda: Parsed(TrainConfig(), (), {}, ()), work, str)
    assert gc.isenabled() and bool(code) == fails and seen == ([False] if fails else [False, True])
