"""--save_async through the doors: the files of a synchronous run; kills, signals and full disks while a thread writes."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import Door, family_of, losses, wait_for
from safetensors.torch import load_file

from difftrain import checkpoint
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import TrainingFault
from difftrain.train.run import run

TIMES = ("clock.json", "manifest.json")
STATES = ("NAME-step00000004-state", "NAME-step00000008-state", "NAME-step00000012-state", "NAME-state")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in TIMES}


def same_end(out: Path, straight: Path) -> None:
    left, right = load_file(out / "NAME.safetensors"), load_file(straight / "NAME.safetensors")
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert losses(out) == losses(straight)


def being_written(out: Path) -> bool:
    """Tell whether there is a checkpoint, and another one on its way."""
    return (out / STATES[0]).is_dir() and any(out.glob("tmp-*"))


@pytest.mark.flags("save_async")
def test_a_run_leaves_what_a_synchronous_one_does(door: Door, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = door.run(door.flags(out, "--save_async"))
    same_end(out, straight)
    for name in STATES:
        assert content(out / name) == content(straight / name), name
        checkpoint.verify(out / name)
    assert output.count(" in the background") == 3  # the last one is waited for anyway


@pytest.mark.nightly
def test_two_ranks_with_averages_leave_what_synchronous_ones_do(door: Door, tmp_path: Path) -> None:
    for name, more in (("now", ()), ("later", ("--save_async",))):
        door.run(door.flags(tmp_path / name, "--use_ema", *more, batch=1), ranks=2)
    same_end(tmp_path / "later", tmp_path / "now")
    for name in STATES:
        found = content(tmp_path / "later" / name)
        assert found == content(tmp_path / "now" / name) and {"ema-00000.safetensors"} < found.keys()
        assert sum(file.startswith("weights-") for file in found) == 2

    # one rank is killed while all write: the other ends, too, and both go on from the one before
    out = tmp_path / "killed"
    flags = door.flags(out, "--use_ema", "--save_async", "--resume=auto", batch=1)
    process = door.start(flags, ranks=2)
    wait_for(lambda: being_written(out))
    os.kill(family_of(process.pid)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, -signal.SIGKILL), output
    checkpoint.verify(out / STATES[0])
    door.run(flags, ranks=2)
    same_end(out, tmp_path / "now")


def test_pieces_of_a_sharded_engine_are_copied_by_every_rank(door: Door, tmp_path: Path) -> None:
    more = ("--engine=fsdp", "--use_ema", "--save_every_n_steps=2")
    for name, how in (("now", ()), ("later", ("--save_async",))):
        door.run(door.flags(tmp_path / name, *more, *how, batch=1, steps=4), ranks=2)
    for name in ("NAME-step00000002-state", "NAME-step00000004-state"):
        found = content(tmp_path / "later" / name)
        assert found == content(tmp_path / "now" / name)
        assert {"weights-00001.safetensors", "ema-00001.safetensors"} < found.keys()


def test_a_kill_while_a_thread_writes_loses_no_step_of_the_result(door: Door, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = door.flags(out, "--save_async", "--resume=auto")
    process = door.start(flags)
    wait_for(lambda: being_written(out))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    checkpoint.verify(out / STATES[0])
    door.run(flags)
    assert not list(out.glob("tmp-*"))
    same_end(out, straight)
    assert content(out / STATES[2]) == content(straight / STATES[2])


def test_a_stop_waits_for_what_is_being_written(door: Door, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = door.flags(out, "--save_async", "--resume=auto")
    process = door.start(flags)
    wait_for(lambda: being_written(out))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    states = sorted(out.glob("*-state"))
    assert len(states) > 1 and not list(out.glob("tmp-*"))
    for state in states:
        checkpoint.verify(state)
    assert len(losses(out)) == max(checkpoint.Manifest.read(state).step for state in states)
    door.run(flags)
    same_end(out, straight)


@pytest.fixture
def start(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the tiny SDXL in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def begun(out: Path, **save: Any) -> int:
        tables: dict[str, Any] = {
            "model": {"init_from_config": "tiny"},
            "data": {"dirs": [str(pictures)], "resolution": [64, 64], "workers": 0},
            "training": {"batch_size": 2, "max_steps": 6, "seed": 1, "threads": 1},
            "save": {"output_dir": str(out), "output_name": "NAME", "checkpoint_every_n_steps": 2, **save},
        }
        return run(TrainConfig.model_validate(tables), ["train.py"])

    return begun


def test_a_full_disk_is_said_as_of_a_synchronous_run(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The limit stands for the disk: the optimizer's file is larger, exports are not."""
    real, messages, ends = checkpoint.commit, [], []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def commit(parent: Path, name: str, *more: Any) -> Path:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if name == "NAME-step00000002-state" else 6_000_000, hard))
        return real(parent, name, *more)

    monkeypatch.setattr(checkpoint, "commit", commit)
    for out, more in ((tmp_path / "now", {}), (tmp_path / "later", {"asynchronous": True})):
        try:
            assert start(out, **more) == 0
            assert (out / "NAME.safetensors").is_file()
            with pytest.raises(TrainingFault) as caught:
                start(out.with_name(f"{out.name} to the end"), state_on_train_end=True, **more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        printed = "".join(capfd.readouterr())
        messages.append([line.partition("ERROR")[2] for line in printed.splitlines() if "ERROR" in line])
        ends.append(str(caught.value))
        assert [path.name for path in out.glob("*-state")] == ["NAME-step00000002-state"] and not list(
            out.glob("tmp-*")
        )
        checkpoint.verify(out / "NAME-step00000002-state")
    assert messages[0] == messages[1] and len(messages[0]) == 4
    assert ends[0] == ends[1]
