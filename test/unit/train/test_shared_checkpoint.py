"""Which checkpoint is whole on every machine, and who reads it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from difftrain.checkpoint import commit, verify
from difftrain.contracts import ConfigFault, Fault
from difftrain.testing.threads import ThreadRanks, on_threads
from difftrain.train import shared_checkpoint


def saved(folder: Callable[[int], Path], size: int, *steps: int, local_size: int = 1) -> None:
    """Commit checkpoints of a file a rank."""

    def save(ranks: ThreadRanks) -> None:
        def write(work: Path) -> list[Path]:
            (work / f"part-{ranks.rank}").write_text("x")
            return [work / f"part-{ranks.rank}"]

        for step in steps:
            commit(folder(ranks.rank), f"N-step{step:08d}-state", write, ranks, {"step": step})  # type: ignore[arg-type]

    assert on_threads(size, save, local_size) == [None] * size


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Note which folders are read to the last byte."""
    read: list[Path] = []

    def noted(path: Path, *, deep: bool = True) -> str:
        if deep:
            read.append(path)
        return fault_here(path, deep=deep)

    fault_here = shared_checkpoint.fault_here
    monkeypatch.setattr(shared_checkpoint, "fault_here", noted)
    return read


def test_a_choice_is_each_machines_own_copy_where_rank_0_has_it_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, expected in (
        (tmp_path / "0" / "state", [tmp_path / "0" / "state", tmp_path / "1" / "state"]),
        (Path("0/state"), [tmp_path / "0" / "state", tmp_path / "1" / "state"]),
        (Path("other/state"), [tmp_path / "other" / "state"] * 2),
        (None, [None, None]),
    ):

        def choose(ranks: ThreadRanks, given: Path | None = given) -> Path | None:
            return shared_checkpoint.choose(Path(str(ranks.rank)), ranks, lambda ask: given)  # type: ignore[arg-type]

        assert on_threads(2, choose, 1) == expected


def test_machines_agree_on_what_all_of_them_have_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = lambda rank: tmp_path / str(rank)  # noqa: E731
    saved(disk, 2, 4, 8, 12)
    shutil.rmtree(disk(1) / "N-step00000012-state")
    (disk(1) / "N-step00000008-state" / "part-1").write_text("y")
    verify(disk(0) / "N-step00000008-state")
    with caplog.at_level("WARNING", "difftrain"):
        found = on_threads(2, lambda ranks: shared_checkpoint.newest(disk(ranks.rank), "N", ranks), 1)  # type: ignore[arg-type]
    assert found == [disk(rank) / "N-step00000004-state" for rank in range(2)]
    absent, damaged = caplog.messages
    assert "N-step00000012-state" in absent and "rank 1: " in absent and "part-1" not in absent
    assert re.search("N-step00000008-state .*rank 1: part-1 .*checksum", damaged)


@pytest.mark.parametrize(("local_size", "disks", "reads"), [(4, 1, 1), (2, 1, 1), (1, 1, 1), (2, 2, 2), (1, 4, 4)])
def test_one_rank_a_disk_reads(tmp_path: Path, readers: list[Path], local_size: int, disks: int, reads: int) -> None:
    disk = lambda rank: tmp_path / f"disk{rank * disks // 4}"  # noqa: E731
    saved(disk, 4, 4, local_size=local_size)
    found = on_threads(4, lambda ranks: shared_checkpoint.newest(disk(ranks.rank), "N", ranks), local_size)  # type: ignore[arg-type]
    assert found == [disk(rank) / "N-step00000004-state" for rank in range(4)]
    assert len(readers) == reads and len(set(readers)) == disks


def test_copies_of_two_commits_under_one_name_are_passed_over(tmp_path: Path) -> None:
    for rank in range(2):
        saved(lambda _, rank=rank: tmp_path / str(rank), 1, 4)  # type: ignore[misc]
    told = on_threads(
        2,
        lambda ranks: shared_checkpoint.fault_of(tmp_path / str(ranks.rank) / "N-step00000004-state", ranks),
        1,  # type: ignore[arg-type]
    )
    assert told[0] and "machines" in told[0] and told[1] == told[0]


def test_what_rank_0_finds_wrong_is_raised_everywhere(tmp_path: Path) -> None:
    def choose(ask: shared_checkpoint.Ask) -> Any:
        raise ConfigFault([Fault("--resume", ask(tmp_path / "missing"))])

    told = on_threads(3, lambda ranks: shared_checkpoint.with_all(tmp_path, ranks, choose))  # type: ignore[arg-type]
    assert all(
        isinstance(each, ConfigFault) and [fault.where for fault in each.faults] == ["--resume"] for each in told
    )
