"""The commit: whole or absent, told to every rank, and nothing earlier is touched."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from difftrain.checkpoint import SaveFault, Torn, clean, commit, load_meta, newest, verify
from difftrain.distributed.ranks import Ranks
from difftrain.testing.threads import on_threads

META = {"step": 4, "kind": "step", "plan_digest": "abc"}


def writer(rank: int, content: bytes = b"weights", folder: str = ""):
    def write(work: Path) -> list[Path]:
        (work / folder).mkdir(exist_ok=True)
        path = work / folder / f"part-{rank}.bin"
        path.write_bytes(content * (rank + 1))
        return [path]

    return write


def save(parent: Path, name: str = "N-step00000004-state", step: int = 4, content: bytes = b"weights") -> Path:
    return commit(parent, name, writer(0, content), Ranks(), {"step": step})


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_one_process_leaves_one_whole_folder(tmp_path):
    path = commit(tmp_path / "made" / "on demand", "N-state", writer(0, folder="ema"), Ranks(), META)
    assert names(path.parent) == ["N-state"]
    assert load_meta(path) == META
    manifest = verify(path)
    assert manifest.step == 4 and manifest.world_size == 1 and list(manifest.files) == ["ema/part-0.bin"]
    assert newest(path.parent, "N") == path


def test_every_rank_writes_and_one_seals(tmp_path):
    results = on_threads(3, lambda ranks: commit(tmp_path, "N-state", writer(ranks.rank), ranks, META))
    assert results == [tmp_path / "N-state"] * 3
    manifest = verify(tmp_path / "N-state")
    assert sorted(manifest.files) == ["part-0.bin", "part-1.bin", "part-2.bin"]
    assert manifest.world_size == 3 and not manifest.spread
    assert [manifest.files[f"part-{rank}.bin"].size for rank in range(3)] == [7, 14, 21]


def test_separate_disks_get_a_manifest_each_with_one_commit(tmp_path):
    def run(ranks):
        disk = tmp_path / f"machine{ranks.rank // 2}"
        return commit(disk, "N-state", writer(ranks.rank), ranks, META)

    results = on_threads(4, run, local_size=2)
    assert results == [tmp_path / f"machine{rank // 2}" / "N-state" for rank in range(4)]
    first, second = verify(results[0]), verify(results[2])
    assert first.commit == second.commit and first.spread and second.spread
    assert sorted(first.files) == ["part-0.bin", "part-1.bin"] and sorted(second.files) == ["part-2.bin", "part-3.bin"]


def test_a_failure_of_one_rank_is_told_to_all_and_leaves_what_was_there(tmp_path):
    before = save(tmp_path)

    def write(ranks):
        def fail(work: Path) -> list[Path]:
            writer(ranks.rank)(work)
            if ranks.rank == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work / "part-1.bin"))
            return [work / f"part-{ranks.rank}.bin"]

        return commit(tmp_path, "N-step00000008-state", fail, ranks, {"step": 8})

    results = on_threads(3, write)
    assert all(isinstance(each, SaveFault) for each in results), results
    assert len({str(each) for each in results}) == 1
    assert "rank 1 could not" in str(results[0]) and "No space" in str(results[0])
    assert names(tmp_path) == [before.name]
    verify(before)


def test_a_folder_that_cannot_be_made_is_told_to_all(tmp_path):
    (tmp_path / "file").write_text("")
    results = on_threads(2, lambda ranks: commit(tmp_path / "file", "N-state", writer(ranks.rank), ranks, META))
    assert all(isinstance(each, SaveFault) and str(tmp_path / "file") in str(each) for each in results)
    # one of two machines
    results = on_threads(
        2, lambda ranks: commit(tmp_path / ("a", "file")[ranks.rank], "N-state", writer(ranks.rank), ranks, META)
    )
    assert all(isinstance(each, SaveFault) and re.search(r"\brank 1\b", str(each)) for each in results)
    assert names(tmp_path / "a") == []


def test_the_file_size_limit_stops_a_real_write(tmp_path):
    before = save(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(SaveFault, match="File too large"):
            save(tmp_path, "N-step00000008-state", 8, b"x" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == [before.name] and newest(tmp_path, "N") == before
    assert save(tmp_path, "N-step00000008-state", 8) == newest(tmp_path, "N")  # and training may go on


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a file system of one MiB")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_nothing(small_disk):
    before = save(small_disk, content=b"x" * 300_000)
    with pytest.raises(SaveFault, match=r"No space .*on device"):
        save(small_disk, "N-step00000008-state", 8, b"x" * 900_000)
    assert names(small_disk) == [before.name]
    assert newest(small_disk, "N") == before


def test_the_same_name_again_replaces_the_old_one_whole(tmp_path):
    save(tmp_path, content=b"old")
    path = save(tmp_path, content=b"newer")
    assert names(tmp_path) == [path.name] and (path / "part-0.bin").read_bytes() == b"newer"
    verify(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "manifest.json").unlink(), r"no manifest\.json"),
        (lambda path: (path / "part-0.bin").unlink(), r"part-0\.bin (?!.*checksum)"),
        (lambda path: (path / "part-0.bin").write_bytes(b"weight"), "has 6 bytes, not 7"),
        (lambda path: (path / "part-0.bin").write_bytes(b"weighty"), r"part-0\.bin is .*checksum"),
        (lambda path: os.truncate(path / "manifest.json", 50), r"manifest\.json .*\("),
        (lambda path: (path / "manifest.json").write_text("[]"), r"manifest\.json .* checkpoint"),
    ],
)
def test_what_is_not_whole_is_passed_over_by_name(tmp_path, damage, reason):
    good = save(tmp_path)
    torn = save(tmp_path, "N-step00000008-state", 8)
    damage(torn)
    said: list[str] = []
    assert newest(tmp_path, "N", said.append) == good
    assert len(said) == 1 and torn.name in said[0] and re.search(reason, said[0]), said
    with pytest.raises(Torn, match=reason):
        verify(torn)


def test_a_changed_manifest_is_known_as_damaged(tmp_path):
    path = save(tmp_path)
    content = json.loads((path / "manifest.json").read_text())
    content["meta"]["step"] = 400
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(Torn, match=r"manifest\.json is .*checksum"):
        verify(path)


def test_every_moment_of_a_crash_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """End the process before each system call that changes the folder; what is found afterwards is old or new."""
    calls = [("rename", Path.rename), ("replace", Path.replace), ("mkdir", Path.mkdir), ("rmdir", Path.rmdir)]
    calls += [("unlink", Path.unlink)]

    class Killed(BaseException):
        pass

    for moment in range(40):
        parent = tmp_path / str(moment)
        parent.mkdir()
        save(parent, content=b"old")
        left = [moment]

        def counted(real, left=left):
            def call(*args, **kwargs):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name, real in calls:
                patch.setattr(Path, name, counted(real))
            try:
                save(parent, content=b"new")
                finished = True
            except Killed:
                finished = False
        clean(parent)
        assert names(parent) == ["N-step00000004-state"], (moment, names(parent))
        path = newest(parent, "N")
        assert path is not None and (path / "part-0.bin").read_bytes() in (b"old", b"new")
        if finished:
            assert moment > 5
            break
    else:
        raise AssertionError("never finished")
