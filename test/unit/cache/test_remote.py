"""A cache on an object store: what is fetched, what is read by ranges, and stores that stall, fail, cut and lose."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import known_implementations
from fsspec.spec import AbstractFileSystem
from refusals import names
from segments import address, item, payload

from difftrain.cache import object_store
from difftrain.cache import remote as ranges
from difftrain.cache.object_store import LocalCopies, RetryPolicy, ShortAnswer, in_parallel
from difftrain.cache.remote import BLOCK, LARGE, RemoteCache, fetch_cache
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.format import unpack
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.store.memory import Verified
from difftrain.cache.store.read import Reader
from difftrain.cache.store.segment import SegmentWriter
from difftrain.config import TrainConfig
from difftrain.config.parse_flags import parse
from difftrain.config.paths import shown_url
from difftrain.contracts import ConfigFault, DataFault, Feature, TrainingFault
from difftrain.data.prepare import index_folder

SIZES = {number: (LARGE * 2 + 3000 * number if number % 2 else 700 * number) for number in range(12)}
QUICK = RetryPolicy(timeout_s=0.15, attempts=3, first_wait_s=0.001, longest_wait_s=0.002)
HEADER = {"encoder": "latents", "fingerprint": "f" * 32, "features": {"latents": "uint8"}, "storage": "uint8"}


class Disturbed(AbstractFileSystem):
    """Serves a folder, after something was done with every read."""

    protocol = "disturbed"
    cachable = False
    root: ClassVar[str] = ""
    reads: ClassVar[list[str]] = []

    @staticmethod
    def disturb(path: str, start: int, stop: int) -> None: ...

    def _real(self, path: str) -> Path:
        return Path(self.root, self._strip_protocol(path).partition("cache/")[2])

    def info(self, path: str, **kwargs) -> dict:
        stat = self._real(path).stat()
        kind = "directory" if self._real(path).is_dir() else "file"
        return {"name": path, "size": stat.st_size, "type": kind, "etag": f"{stat.st_mtime_ns}-{stat.st_ino}"}

    def ls(self, path: str, detail: bool = True, **kwargs) -> list:
        return [self.info(f"{path}/{name}") for name in sorted(each.name for each in self._real(path).iterdir())]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs) -> bytes:
        Disturbed.reads.append(path)
        with self._real(path).open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
        changed = type(self).disturb(path, start, end)
        return content if changed is None else changed(content)


class Later(AsyncFileSystem):
    """Serves a folder by the loop of one thread, as the file systems of object stores do."""

    protocol = "later"
    root: ClassVar[str] = ""

    def _real(self, path: str) -> Path:
        return Path(self.root, self._strip_protocol(path).partition("cache/")[2])

    async def _info(self, path: str, **kwargs) -> dict:
        stat = self._real(path).stat()
        return {"name": path, "size": stat.st_size, "type": "file", "mtime": stat.st_mtime}

    async def _ls(self, path: str, detail: bool = True, **kwargs) -> list:
        return [await self._info(f"{path}/{name}") for name in sorted(each.name for each in self._real(path).iterdir())]

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs) -> bytes:
        return self._real(path).read_bytes()[start:end]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheFolder:
    """Make a cache of a few entries, and serve it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = CacheFolder.open(tmp_path / "cache", create=True)
    writer = SegmentWriter(folder, HEADER, segment_bytes=700_000)
    for number, size in SIZES.items():
        writer.append([item(number, size)])
    writer.close()
    merge(folder)
    for system in (Disturbed, Later):
        fsspec.register_implementation(system.protocol, system, clobber=True)
        monkeypatch.setattr(system, "root", str(folder.path))
    monkeypatch.setattr(Disturbed, "disturb", staticmethod(lambda path, start, stop: None))
    monkeypatch.setattr(Disturbed, "reads", [])
    return folder


def fetch(copy_gib: float = 1.0, url: str = "disturbed://bucket/cache") -> RemoteCache:
    return fetch_cache(url, copy_gib, lambda line: None, patience=QUICK)


def rows(remote: RemoteCache, numbers=SIZES) -> list:
    found = [Metadata(remote.folder / "metadata.db").lookup(address(number)) for number in numbers]
    assert all(found)
    return found


def read(remote: RemoteCache, numbers=SIZES, segments=None, want=True) -> None:
    """Read entries and compare them with what was written."""
    segments, places = segments or remote.segments, rows(remote, numbers)
    if want:
        segments.want([(row.segment, row.offset, row.length) for row in places])
    for number, row in zip(numbers, places):
        head, rest = bytearray(min(40, row.length)), np.zeros(max(0, row.length - 40), np.uint8)
        segments.read(row.segment, row.offset, [head, rest])
        assert bytes(head) + rest.tobytes() == payload(number, SIZES[number])


def disturb(monkeypatch: pytest.MonkeyPatch, what, where: str = BIN) -> list[int]:
    """Let reads of segments be disturbed; return a list that counts them."""
    calls: list[int] = []

    def each(path: str, start: int, stop: int):
        if where in path:
            calls.append(start)
            return what(len(calls))
        return None

    monkeypatch.setattr(Disturbed, "disturb", staticmethod(each))
    return calls


@pytest.mark.flags("cache_dir")
@pytest.mark.parametrize("url", ["disturbed://bucket/cache", "later://bucket/cache", "file"])
@pytest.mark.parametrize("want", [True, False])
def test_entries_are_read_by_ranges_and_kept(cache, url, want) -> None:
    remote = fetch(url=f"file://{cache.path}" if url == "file" else url)
    read(remote, want=want)
    Disturbed.reads.clear()
    read(remote, [5, 2, 2, 5, 11], want=want)
    assert not Disturbed.reads, "all was kept"
    assert remote.folder.is_relative_to(cache.path.parent / "home")


def test_more_copies_than_are_held_open_are_read_at_once(cache, monkeypatch) -> None:
    monkeypatch.setattr(ranges, "_OPEN", 2)
    remote = fetch()
    for _ in range(2):
        read(remote)
    segments = remote.segments
    segments.want([(row.segment, row.offset, row.length) for row in rows(remote)])
    held = [type(each).__name__ for _, contents in segments._cached_pieces.values() for each in contents]
    assert held.count("OpenCopy") == 2 and "memoryview" in held


def test_what_has_not_changed_is_not_fetched_again_and_a_run_keeps_the_state_it_began_with(cache) -> None:
    first = fetch()
    Disturbed.reads.clear()
    assert fetch() == first and not Disturbed.reads
    writer = SegmentWriter(cache, HEADER)
    writer.append([item(99, 5000)])
    writer.close()
    merge(cache)
    second = fetch()
    assert second.folder != first.folder
    assert [path.rpartition("/")[2] for path in Disturbed.reads] == ["metadata.db"], "cache.json is the same"
    assert Metadata(first.folder / "metadata.db").lookup(address(99)) is None
    assert Metadata(second.folder / "metadata.db").lookup(address(99)) is not None


def test_states_that_nobody_used_for_a_day_are_removed(cache, monkeypatch) -> None:
    first = fetch()
    read(first)
    (cache.path / "metadata.db").touch()
    os.utime(first.folder, (0, 0))
    second = fetch()
    assert not first.folder.exists() and second.folder.exists() and second.copies.folder.exists()


def test_a_store_without_stamps_is_believed_at_no_time(cache, monkeypatch) -> None:
    plain = Disturbed.info
    monkeypatch.setattr(Disturbed, "info", lambda self, path: {**plain(self, path), "etag": None})
    first, second = fetch(), fetch()
    assert first.folder != second.folder
    read(second)


def test_segments_that_were_not_sealed_are_read_too(cache) -> None:
    for path in cache.segments.iterdir():
        path.rename(path.with_name(f"{path.name}.part"))
    read(fetch())


def test_a_store_that_stalls_is_left_alone_and_asked_again(cache, monkeypatch) -> None:
    held, remote = threading.Event(), fetch()
    disturb(monkeypatch, lambda call: held.wait(30) and None if call <= 2 else None)
    started = time.monotonic()
    read(remote, [1])
    assert 0.25 < time.monotonic() - started < 2
    held.set()


def test_a_store_that_stalls_for_ever_is_named(cache, monkeypatch, capsys) -> None:
    held, remote = threading.Event(), fetch()
    disturb(monkeypatch, lambda call: held.wait(30) and None)
    row = rows(remote, [1])[0]
    with pytest.raises(TrainingFault) as fault:
        read(remote, [1])
    for said in (
        f"disturbed://bucket/cache/segments/{row.segment}.bin, bytes {row.offset:,} to {row.offset + row.length:,}",
        "3 attempts",
        "no answer",
    ):
        assert said in str(fault.value)
    held.set()


def test_a_store_that_stalls_at_the_start_is_named(cache, monkeypatch) -> None:
    held = threading.Event()
    monkeypatch.setattr(Disturbed, "info", lambda self, path: held.wait(30))
    with pytest.raises(TrainingFault, match=r"(cache\.json|metadata\.db): .* 3 attempts "):
        fetch()
    held.set()


def _lose(call: int) -> None:
    raise ConnectionResetError("the peer is gone")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (_lose, "ConnectionResetError: the peer is gone"),
        (lambda call: lambda content: content[:-7], "ShortAnswer"),
    ],
)
def test_lost_connections_and_cut_answers_are_asked_again_then_named(cache, monkeypatch, what, said) -> None:
    remote = fetch()
    calls = disturb(monkeypatch, lambda call: what(call) if call < 3 else None)
    read(remote, [1])
    assert len(calls) == 3
    disturb(monkeypatch, what)
    with pytest.raises(TrainingFault, match=f" 3 attempts .*{said}"):
        read(remote, [3])


def test_failed_attempts_are_told_before_it_is_over(cache, monkeypatch, capsys) -> None:
    remote = fetch_cache(
        "disturbed://bucket/cache", 1, print, patience=RetryPolicy(0.2, attempts=5, first_wait_s=0.001)
    )
    disturb(monkeypatch, lambda call: _lose(call) if call < 5 else None)
    read(remote, [1])
    said = capsys.readouterr()
    assert "attempt 2 of 5 failed: ConnectionResetError" in said.err and "attempt 1" not in said.err


def test_an_index_that_breaks_off_while_it_is_fetched_is_asked_for_again(cache, monkeypatch) -> None:
    disturb(monkeypatch, lambda call: (lambda content: content[:100]) if call == 1 else None, "metadata.db")
    read(fetch(), [1, 2])


def test_an_index_that_changes_while_it_is_fetched_is_named(cache, monkeypatch) -> None:
    disturb(monkeypatch, lambda call: cache.database.touch(), "metadata.db")
    with pytest.raises(TrainingFault, match=r"metadata\.db .*while it was fetched"):
        fetch()
    assert not list((cache.path.parent / "home").rglob("metadata.db*"))


def test_a_segment_that_is_gone_or_cut_is_named(cache) -> None:
    remote = fetch()
    lost, cut = rows(remote, [1])[0], rows(remote, [11])[0]
    (cache.segments / f"{lost.segment}.bin").unlink()
    with pytest.raises(TrainingFault) as caught:
        read(remote, [1])
    assert f"segments/{lost.segment}.bin " in str(caught.value) and names(caught.value, f"{lost.offset:,}")
    os.truncate(cache.segments / f"{cut.segment}.bin", cut.offset + 100)
    with pytest.raises(TrainingFault, match=rf"{cut.segment}.bin, bytes .* ShortAnswer: .* 100 bytes "):
        read(remote, [11])


def test_a_server_that_sends_whole_files_is_named_at_once(cache, monkeypatch) -> None:
    remote = fetch()
    calls = disturb(monkeypatch, lambda call: lambda content: content + b"more")
    with pytest.raises(TrainingFault, match=r"segments/seg-.*\.bin: .* range requests"):
        read(remote, [1])
    assert len(calls) == 1


def test_what_is_no_cache_is_named(cache) -> None:
    with pytest.raises(DataFault, match=r"disturbed://bucket/cache/none: .*, cache\.json"):
        fetch(url="disturbed://bucket/cache/none")
    cache.database.unlink()
    with pytest.raises(DataFault, match=r"not complete, metadata\.db is .*there"):
        fetch()


@pytest.mark.flags("cache_dir")
def test_urls_that_cannot_be_read_here_are_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(known_implementations, "cloudy", {"class": "cloudyfs.FS", "err": "Install cloudyfs"})
    with pytest.raises(ConfigFault, match=r"'cloudy://bucket/cache' .* cloudyfs, .*\(pip install cloudyfs\)"):
        fetch_cache("cloudy://bucket/cache")
    line = ["--init_from_config=tiny", f"--train_data_dir={tmp_path}", f"--output_dir={tmp_path}/out"]
    for url, said in (
        (
            "cloudy://b",
            r"--cache_dir: 'cloudy://b' .* cloudyfs, .*\(pip install cloudyfs\)",
        ),
        ("clowdy://a@c", "--cache_dir: 'clowdy://a@c': .*'clowdy' "),
        ("memory://me:secret@c", "--cache_dir: 'memory://…@c' "),
    ):
        with pytest.raises(ConfigFault) as fault:
            parse([*line, "--cache_latents_to_disk", f"--cache_dir={url}"])
        assert any(re.match(said, str(each)) for each in fault.value.faults)


@pytest.mark.flags("cache_dir")
def test_the_index_of_the_data_stays_on_this_machine(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = TrainConfig.model_validate({"data": {"dirs": ("a",), "cache_dir": "memory://bucket/cache"}})
    assert index_folder(cfg).parent == tmp_path / "difftrain" / "index"


def test_passwords_are_not_shown() -> None:
    assert shown_url("ftp://me:secret@host/x") == "ftp://…@host/x"
    assert shown_url("s3://bucket/a@b:c") == "s3://bucket/a@b:c"


def _reader(remote: RemoteCache) -> Reader:
    metadata = Metadata(remote.folder / "metadata.db")
    verified = Verified(Verified.reserve(metadata.count), metadata.generation)
    features = {"latents": Feature((1,), dtype="uint8")}
    return Reader(remote.segments, metadata, features, verified, cache=remote.url)


@pytest.mark.parametrize("number", [3, 4])
def test_a_damaged_copy_is_brought_anew_and_a_damaged_entry_named(cache, number) -> None:
    remote = fetch()
    read(remote)
    row = rows(remote, [number])[0]
    for path in remote.copies.folder.rglob(f"{row.segment}-*"):
        os.truncate(path, 0)
        path.write_bytes(bytes(2 * BLOCK)[: 2 * LARGE + 20_000])
    found = _reader(remote).read([address(number)])["latents"]
    assert (found[0].numpy() == unpack(np.frombuffer(payload(number, SIZES[number]), np.uint8))[0].data).all()

    with (cache.segments / f"{row.segment}.bin").open("r+b") as file:
        file.seek(row.offset + row.length - 9)
        file.write(b"damaged")
    shutil.rmtree(remote.copies.folder)
    with pytest.raises(TrainingFault, match=f"segment {row.segment}.*checksum .*cache repair"):
        _reader(remote).read([address(number)])


# --- the bounded copy ---


def _hammer(remote: RemoteCache, seed: int) -> None:
    numbers, segments = list(SIZES), remote.segments
    rng = np.random.default_rng(seed)
    for _ in range(25):
        read(remote, rng.choice(numbers, 3).tolist(), segments)


@pytest.mark.flags("cache_copy_gib")
def test_a_bound_below_the_working_set_is_held_by_processes_that_share_it(cache) -> None:
    bound = 1_200_000
    remote = fetch(bound / 2**30)
    assert sum(map(len, (payload(number, size) for number, size in SIZES.items()))) > 1.3 * bound
    workers = [multiprocessing.get_context("fork").Process(target=_hammer, args=(remote, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    most = 0
    while any(worker.is_alive() for worker in workers):
        most = max(most, _kept_bytes(remote.copies.folder))
        time.sleep(0.005)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert not (remote.copies.folder / "full").exists(), "nobody takes away what another is writing"
    assert 0 < most <= bound + 3 * (2 * LARGE + 40_000), "each writer may have one more in its hands"
    assert not list(remote.copies.folder.rglob("tmp-*"))


def _kept_bytes(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def test_the_least_recently_used_go_first(tmp_path) -> None:
    kept = LocalCopies(tmp_path, 1000)
    for number in range(9):
        kept.put(f"{number}", bytes(100))
        os.utime(next(kept.folder.rglob(f"{number}")), (number, number))
    assert kept.open("0") is not None, "which marks it as used"
    for number in range(9, 14):
        kept.put(f"{number}", bytes(100))
    there = {number for number in range(14) if kept.open(str(number)) is not None}
    assert {0, 13} <= there and not {1, 2, 3} & there and len(there) <= 10


def test_what_killed_writers_left_is_removed(tmp_path) -> None:
    kept = LocalCopies(tmp_path, 1000)
    kept.put("a", bytes(800))
    left, writing = (kept.folder / "0" / name for name in ("tmp-left", "tmp-writing"))
    for path in (left, writing):
        path.write_bytes(bytes(100))
    os.utime(left, (0, 0))
    kept.put("b", bytes(800))
    assert not left.exists() and writing.exists() and kept.open("a") is None


def test_a_full_disk_is_said_once_and_everything_is_read_from_the_store(cache, monkeypatch, capsys) -> None:
    def full(self, path, content) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalCopies, "_write", full)
    remote = fetch()
    read(remote)
    read(remote)
    said = capsys.readouterr().err
    assert said.count(" copies") == 1 and "No space" in said


def test_a_disk_that_others_have_filled_is_left_to_them(cache, monkeypatch, capsys) -> None:
    remote = fetch()
    read(remote)
    before = _kept_bytes(remote.copies.folder)
    monkeypatch.setattr(object_store, "_RESERVE", 1 << 60)
    monkeypatch.setattr(object_store, "_RESERVED_SHARE", 1.0)
    shutil.rmtree(next(remote.copies.folder.glob("0")))
    read(remote)
    assert _kept_bytes(remote.copies.folder) < before
    assert "space left" in capsys.readouterr().err


# --- forks and threads ---


@pytest.mark.parametrize("url", ["disturbed://bucket/cache", "later://bucket/cache"])
def test_forked_workers_read_after_their_parent_has(cache, url) -> None:
    remote = fetch(url=url)
    segments = remote.segments
    read(remote, [1, 2], segments)
    shutil.rmtree(remote.copies.folder)
    workers = [
        multiprocessing.get_context("fork").Process(target=read, args=(remote, [3, 4, number], segments))
        for number in (5, 6)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0]
    read(remote, [1, 7], segments)


def test_file_systems_of_one_connection_are_asked_by_one_thread_at_a_time(cache, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "_ONE_BY_ONE", {"disturbed"})
    remote, inside, most = fetch(), threading.Semaphore(1), []

    def alone(call: int) -> None:
        most.append(inside.acquire(blocking=False))
        time.sleep(0.005)
        inside.release()

    disturb(monkeypatch, alone)
    read(remote)
    assert len(most) > 4 and all(most)


def test_spawned_workers_get_it_pickled(cache) -> None:
    import pickle

    remote = fetch()
    again, segments = pickle.loads(pickle.dumps((remote, remote.segments)))
    assert again == remote
    read(again, segments=segments)


def test_calls_in_parallel_keep_their_order_and_raise_the_first_error() -> None:
    barrier = threading.Barrier(3, timeout=5)
    assert in_parallel([lambda n=n: (barrier.wait(), n)[1] for n in range(3)]) == [0, 1, 2]

    def fail() -> None:
        raise ShortAnswer("no")

    begun: list[int] = []
    with pytest.raises(ShortAnswer):
        in_parallel([fail, *(lambda n=n: begun.append(n) for n in range(1000))], threads=1)
    assert not begun
