"""Checkpoints in the background: the state of their step, one at a time, committed by all ranks or by none."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import built, run

from difftrain import checkpoint
from difftrain.checkpoint import SaveName
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import TrainingFault
from difftrain.distributed.ranks import RankLost, Ranks
from difftrain.engine import snapshot
from difftrain.hub.uploads import Uploads
from difftrain.report.clock import Clock
from difftrain.report.notices import Notices
from difftrain.testing.threads import ThreadRanks, on_threads
from difftrain.train import checkpoints as module
from difftrain.train.averages import Averages
from difftrain.train.checkpoints import Checkpoints
from difftrain.train.state import Position, TrainProgress

TIMES = ("clock.json", "manifest.json")


class Stage:
    """A run that is stepped by hand: a tiny engine with an average, and its checkpoints."""

    def __init__(self, folder: Path, ranks: Any = None, engine: Any = None, **save: Any) -> None:
        save = {"output_dir": str(folder), "output_name": "N", "asynchronous": True, **save}
        cfg = TrainConfig.model_validate({"save": save, "ema": {"enable": True, "decay": 0.5}})
        self.engine = engine or built()
        self.averages: Any = Averages(cfg.ema, self.engine) if engine is None else None
        self.progress, self.clock = TrainProgress(), Clock(session_steps=9)
        self.begun = 0
        model: Any = SimpleNamespace(engine=self.engine, averages=self.averages)
        claim: Any = SimpleNamespace(check=lambda: None, owned=ranks is None or ranks.local_rank == 0)
        meter: Any = SimpleNamespace(update_progress=lambda: self.progress)
        self.checkpoints = Checkpoints(
            cfg, model, ranks or Ranks(), self.clock, claim, meter, Uploads(), Notices(), self.meta, self.begins
        )

    def meta(self, kind: str) -> dict[str, object]:
        return {"step": self.progress.step, "kind": kind}

    def begins(self) -> None:
        self.begun += 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            run(self.engine, self.progress.step, self.progress.step + 1)
            self.averages.update(self.progress.step)
            self.progress.step += 1
            self.progress.samples_seen += 8

    def save(self, **how: bool) -> None:
        self.checkpoints.write(self.at, SaveName("step", self.progress.step), **how)

    @property
    def at(self) -> Position:
        return Position(self.progress.step)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "checkpoint_bytes", lambda _: 0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every write until the gate is opened."""
    opened, real = threading.Event(), snapshot.write_safetensors

    def write(*args: Any) -> None:
        assert opened.wait(60)
        real(*args)

    monkeypatch.setattr(snapshot, "write_safetensors", write)
    yield opened
    opened.set()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in TIMES}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_later_is_the_state_of_its_step(tmp_path: Path, gate: threading.Event) -> None:
    """Weights, optimizer, average and counters go on meanwhile; the next save uses the same memory."""
    now = Stage(tmp_path / "now", asynchronous=False)
    now.train(3)
    gate.set()
    now.save()
    gate.clear()
    later = Stage(tmp_path / "later")
    later.train(3)
    later.save()
    later.train(3)
    assert later.checkpoints.newest is None and later.checkpoints.has(Position(3))
    gate.set()
    later.checkpoints.finish_pending(wait=True)
    expected = content(tmp_path / "now" / "N-step00000003-state")
    assert {"weights-00000.safetensors", "ema-00000.safetensors", "progress.json"} < expected.keys()
    assert content(tmp_path / "later" / "N-step00000003-state") == expected
    later.save()
    later.checkpoints.finish_pending(wait=True)
    now.train(3)
    now.save()
    assert content(later.checkpoints.newest) == content(now.checkpoints.newest)  # type: ignore[arg-type]
    assert checkpoint.verify(later.checkpoints.newest).step == 6  # type: ignore[arg-type]


def test_the_next_one_waits_and_says_for_how_long(
    tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path)
    stage.train(1)
    stage.save()
    first = stage.checkpoints._pending
    threading.Timer(0.3, gate.set).start()
    stage.train(1)
    with caplog.at_level("INFO", "difftrain"):
        stage.save()
    assert first is not None and first.work.ended() and stage.checkpoints.saved_at == 1
    (waited,) = [
        record for record in caplog.records if " waited " in record.getMessage() and record.args[0] != first.name
    ]  # type: ignore[index]
    assert waited.args[2] == first.name and float(waited.args[1]) > 0.1  # type: ignore[index,arg-type]
    stage.checkpoints.finish_pending(wait=True)
    assert names(tmp_path) == ["N-step00000001-state", "N-step00000002-state"]


def test_only_the_time_in_which_training_stands_still_is_saving(tmp_path: Path, gate: threading.Event) -> None:
    stage = Stage(tmp_path)
    stage.train(1)
    stage.save()
    time.sleep(0.5)
    stage.checkpoints.finish_pending(wait=False)
    assert stage.checkpoints.newest is None  # it is not waited for between steps
    gate.set()
    assert stage.checkpoints._pending is not None and stage.checkpoints._pending.work.ended(60)
    stage.checkpoints.finish_pending(wait=False)
    assert stage.checkpoints.saved_at == 1 and stage.checkpoints.written == 1
    assert 0.0 < stage.clock.session().pauses_s["saving"] < 0.4


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), MemoryError("no room")])
def test_a_failure_is_told_as_if_training_had_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    messages = []
    for asynchronous in (False, True):
        stage = Stage(tmp_path / str(asynchronous), asynchronous=asynchronous)
        stage.train(1)
        stage.save(wait=True)

        def fail(*_: Any) -> None:
            raise error

        with monkeypatch.context() as patch, caplog.at_level("ERROR", "difftrain"):
            patch.setattr(snapshot, "write_safetensors", fail)
            caplog.clear()
            stage.train(1)
            stage.save()
            stage.checkpoints.finish_pending(wait=True)
            messages.append(caplog.messages)
            assert stage.checkpoints.failed == 1 and not stage.checkpoints.has(stage.at)
            with pytest.raises(checkpoint.SaveFault, match=r"N-step00000002-state was not"):
                stage.save(must=True)
        assert names(tmp_path / str(asynchronous)) == ["N-step00000001-state"]
        checkpoint.verify(tmp_path / str(asynchronous) / "N-step00000001-state")
        stage.save()  # and training goes on
        stage.checkpoints.finish_pending(wait=True)
        assert stage.checkpoints.saved_at == 2
    assert messages[0] == messages[1] and len(messages[0]) == 1


def test_an_error_waits_for_what_is_being_written(tmp_path: Path, gate: threading.Event) -> None:
    stage = Stage(tmp_path)
    stage.train(1)
    with pytest.raises(TrainingFault), stage.checkpoints.kept_on_errors():
        stage.save()
        threading.Timer(0.3, gate.set).start()
        raise TrainingFault("a step failed")
    assert names(tmp_path) == ["N-step00000001-state"]


@pytest.mark.parametrize("end", [RankLost("rank 1 is gone"), SystemExit(143)])
def test_a_lost_rank_and_an_impatient_signal_are_not_waited_for(
    tmp_path: Path, gate: threading.Event, end: BaseException
) -> None:
    """What is left is put away by the next start."""
    stage = Stage(tmp_path)
    stage.train(1)
    with pytest.raises(type(end)), stage.checkpoints.kept_on_errors():
        stage.save()
        raise end
    assert stage.checkpoints._pending is not None and not stage.checkpoints._pending.work.ended()
    assert all(name.startswith("tmp-") for name in names(tmp_path))


def test_what_is_replaced_goes_once_the_newer_one_is_verified(
    tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path, last_n_steps_state=1)
    for _ in range(3):
        gate.set()
        stage.train(1)
        stage.save()
        stage.checkpoints.finish_pending(wait=True)
    assert names(tmp_path) == ["N-step00000002-state", "N-step00000003-state"]
    gate.clear()
    stage.train(1)
    stage.save()
    time.sleep(0.1)
    assert {"N-step00000002-state", "N-step00000003-state"} < set(names(tmp_path))
    gate.set()
    with caplog.at_level("INFO", "difftrain"):
        stage.checkpoints.finish_pending(wait=True)
    assert names(tmp_path) == ["N-step00000003-state", "N-step00000004-state"]
    assert any("N-step00000002-state" in message and "deleted" in message for message in caplog.messages)


def test_memory_of_copies_is_there_before_the_first_save(tmp_path: Path) -> None:
    """Taken behind the first step, when the optimizer has its state; nothing is copied, and nothing is lost."""
    stage = Stage(tmp_path)
    stage.train(1)
    stage.checkpoints.reserve(due=False)
    assert stage.checkpoints._reserved is None
    stage.checkpoints.reserve(due=True)
    assert stage.checkpoints._reserved is not None and stage.checkpoints._reserved.ended(60)
    places = {name: buffer.data_ptr() for name, buffer in stage.engine._buffers._buffers.items()}
    averages = {name: buffer.data_ptr() for name, buffer in stage.checkpoints._buffers._buffers.items()}
    assert places and averages
    stage.train(1)
    stage.save()
    stage.checkpoints.finish_pending(wait=True)
    assert {name: buffer.data_ptr() for name, buffer in stage.engine._buffers._buffers.items()} == places
    assert {name: buffer.data_ptr() for name, buffer in stage.checkpoints._buffers._buffers.items()} == averages
    now = Stage(tmp_path / "now", asynchronous=False)
    now.train(2)
    now.save()
    assert content(stage.checkpoints.newest) == content(now.checkpoints.newest)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- several ranks


class Part:
    """What a rank of a sharded engine writes, after some time, or fails to."""

    def __init__(self, rank: int, wait: Callable[[], None]) -> None:
        self.rank, self.wait = rank, wait

    def snapshot(self) -> Part:
        return self

    def write(self, folder: Path) -> list[Path]:
        self.wait()
        path = folder / f"weights-{self.rank:05d}.safetensors"
        snapshot.write_safetensors(path, {"w": torch.full((4,), float(self.rank))}, {})
        return [path]


def on_ranks(folder: Path, wait: Callable[[int], None], act: Callable[[Stage], Any], disks: int) -> list[Any]:
    """Act as every rank of four, on so many machines with a disk each."""

    def as_rank(ranks: ThreadRanks) -> Any:
        disk = folder / f"machine{ranks.rank // (4 // disks)}"
        part = Part(ranks.rank, lambda: wait(ranks.rank))
        stage = Stage(disk, ranks, part)
        stage.averages = SimpleNamespace(snapshot=lambda _: lambda _: [])
        stage.checkpoints._model = SimpleNamespace(engine=part, averages=stage.averages)  # type: ignore[assignment]
        stage.progress.step = 5
        return act(stage)

    return on_threads(4, as_rank, local_size=4 // disks)


@pytest.mark.parametrize("disks", [1, 2])
def test_it_counts_once_every_rank_has_written(tmp_path: Path, disks: int) -> None:
    opened = threading.Event()

    def wait(rank: int) -> None:
        assert rank != 3 or opened.wait(60)

    def act(stage: Stage) -> tuple[int, int]:
        stage.save()
        time.sleep(0.2)
        stage.checkpoints.finish_pending(wait=False)
        before = stage.checkpoints.saved_at
        opened.set()
        stage.checkpoints.finish_pending(wait=True)
        return before, stage.checkpoints.saved_at

    assert on_ranks(tmp_path, wait, act, disks) == [(-1, 5)] * 4
    manifests = [checkpoint.verify(tmp_path / f"machine{disk}" / "N-step00000005-state") for disk in range(disks)]
    files = list(itertools.chain.from_iterable(manifest.files for manifest in manifests))
    assert [name for name in sorted(files) if name.startswith("weights")] == [
        f"weights-{rank:05d}.safetensors" for rank in range(4)
    ]
    assert len({manifest.commit for manifest in manifests}) == 1
    assert all(manifest.spread is (disks > 1) for manifest in manifests)


@pytest.mark.parametrize("disks", [1, 2])
def test_a_rank_whose_disk_is_full_fails_it_on_all(tmp_path: Path, disks: int) -> None:
    def wait(rank: int) -> None:
        if rank == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def act(stage: Stage) -> tuple[int, int]:
        stage.save()
        stage.checkpoints.finish_pending(wait=True)
        return stage.checkpoints.saved_at, stage.checkpoints.failed

    assert on_ranks(tmp_path, wait, act, disks) == [(-1, 1)] * 4
    assert [names(tmp_path / f"machine{disk}") for disk in range(disks)] == [[]] * disks


def test_an_error_of_one_rank_loses_no_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    """The others do not vote any more: their threads go on."""
    opened = threading.Event()

    def act(stage: Stage) -> Any:
        with stage.checkpoints.kept_on_errors():
            stage.save()
            if stage.checkpoints._ranks.rank == 1:
                threading.Timer(0.2, opened.set).start()
                raise TrainingFault("rank 1 alone")
            pending = stage.checkpoints._pending
            assert pending is not None
            return pending.work.ended(60)

    results = on_ranks(tmp_path, lambda _: opened.wait(60) and None, act, disks=1)
    assert [type(result) for result in results] == [bool, TrainingFault, bool, bool]
    checkpoint.verify(tmp_path / "machine0" / "N-step00000005-state")


class SlowRanks(Ranks):
    """One rank of a job whose other one has not written yet when it is asked for once."""

    behind = False

    def any(self, value: bool) -> bool:
        was_behind, self.behind = self.behind, False
        return value or was_behind


def test_a_rank_that_has_written_lets_the_others_write(tmp_path: Path) -> None:
    ranks = SlowRanks()
    stage = Stage(tmp_path, ranks)
    stage.train(1)
    stage.save()
    pending = stage.checkpoints._pending
    assert pending is not None and pending.work.ended(60)
    ranks.behind = True
    stage.checkpoints.finish_pending(wait=False)
    assert stage.checkpoints._pending is pending
    stage.checkpoints.finish_pending(wait=False)
    assert stage.checkpoints._pending is None and names(tmp_path) == ["N-step00000001-state"]
