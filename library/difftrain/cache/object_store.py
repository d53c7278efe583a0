"""Bytes of an object store: every attempt has a time-out; a bounded folder of copies is shared by all processes."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import shutil
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from difftrain.config.paths import shown_url
from difftrain.config.spellings.spelling import option
from difftrain.contracts import TrainingFault

_SHARES, _SHARE = 16, 256 << 20  # most sub-folders, and the bytes from which there is another
_LOOKS = 512  # a writer looks through a sub-folder each time that it has written this part of its share
_KEPT = 0.9  # of a share, when something has to go
_USED_S = 60.0  # a copy that is read is marked as used, at most once in this time
_STALE_S = 600.0  # what is still being written after this time was left by a killed process
_PAUSE_S = 60.0  # without copies, where the disk is full
_QUIET_S = 3600.0
_REPORTED: set[Path] = set()  # by this process, of folders where no mark can be left
_RESERVE, _RESERVED_SHARE = 1 << 30, 0.05  # of the disk, the smaller one is left to others


class OpenCopy:
    """A copy that is open: it stays what it is, also when it is removed."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self.size = file, size

    def fill(self, at: int, views: list[memoryview], length: int) -> bool:
        """Fill buffers, of a length together, from a place on; tell whether all could be read."""
        try:
            return os.preadv(self._file.fileno(), views, at) == length
        except OSError:
            return False

    def content(self) -> memoryview:
        """Read all of it; what cannot be read is left zero, and has a wrong checksum."""
        content = memoryview(bytearray(self.size))
        self.fill(0, [content], self.size)
        return content

    def __del__(self) -> None:
        self._file.close()


class LocalCopies:
    """LocalCopies of things that never change, by name. Picklable."""

    def __init__(self, folder: Path, bound: int) -> None:
        """Open. bound: bytes of all copies together; 0 for none."""
        self.shares = min(max(bound // _SHARE, 1), _SHARES)
        self.folder, self.bound = folder / f"copies-{self.shares}", bound
        self._written: dict[Path, int] = {}  # since this process last looked through a sub-folder
        self._paused_until = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalCopies, (self.folder.parent, self.bound)

    def open(self, name: str) -> OpenCopy | None:
        """Open a copy, and mark it as used; None where there is none."""
        if not self.bound:
            return None
        path = self._path(name)
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            return None
        stat = os.fstat(file.fileno())
        if time.time() - stat.st_mtime > _USED_S:
            with contextlib.suppress(OSError):  # removed meanwhile
                os.utime(path)
        return OpenCopy(file, stat.st_size)

    def put(self, name: str, content: Any) -> None:
        """Keep a copy, where there is room for it; a disk that is full is said once."""
        path, size = self._path(name), memoryview(content).nbytes
        share = self.bound // self.shares
        if size > share * _KEPT or time.monotonic() < self._paused_until:
            return
        try:
            written = self._written.get(path.parent, share) + size
            if written >= share // _LOOKS:
                self._tidy(path.parent, share, size)
                written = 0
            self._written[path.parent] = written
            self._write(path, content)
        except OSError as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            self._log_fault(error)

    def touch(self) -> None:
        """Let others see that the copies are in use."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)

    def drop(self, name: str) -> None:
        """Remove a copy that is not what it should be."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{zlib.crc32(name.encode()) % self.shares:x}" / name

    def _write(self, path: Path, content: Any) -> None:
        """Write a copy. Nothing makes it durable: what a crash leaves has a wrong checksum and is brought anew."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"tmp-{uuid.uuid4().hex}")
        try:
            with aside.open("xb", buffering=0) as file:
                remaining = memoryview(content).cast("B")
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def _tidy(self, folder: Path, share: int, coming: int) -> None:
        """Make room for what is coming. Raises OSError where others have filled the disk."""
        copies, now, used = [], time.time(), 0
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    used += stat.st_size
                    if not entry.name.startswith("tmp-"):
                        copies.append((stat.st_mtime, stat.st_size, entry.path))
                    elif stat.st_mtime < now - _STALE_S:
                        copies.append((0.0, stat.st_size, entry.path))
        full = self._full()
        limit = used // 2 if full else share * _KEPT
        for _, size, path in sorted(copies) if full or used + coming > share else ():
            if used + coming <= limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            used -= size
        if full:
            raise OSError(28, "hardly any space left on device")

    def _full(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(self.folder)
        return disk.free < min(_RESERVE, disk.total * _RESERVED_SHARE)

    def _log_fault(self, error: OSError) -> None:
        """Say that nothing is kept; once for all processes, as far as a mark can be left."""
        mark = self.folder / "full"
        with contextlib.suppress(OSError):
            if time.time() - mark.stat().st_mtime > _QUIET_S:
                mark.unlink()
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            if mark in _REPORTED:
                return
            _REPORTED.add(mark)
        say_to_all(
            f"cache: {self.folder} has no room for more copies from the store ({error.strerror or error}): "
            f"entries are read from the store every time. Free some space there, or lower {option('cache.copy_gib')}"
        )


T = TypeVar("T")
THREADS = 8  # requests of a process at once
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ONE_BY_ONE = {"ftp", "sftp", "ssh", "smb"}  # file systems whose threads share one connection
_SAID_FROM = 2  # attempt
# what stores call that which changes with a file's content; dates only where there is nothing else
_STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "blob_id", "mtime", "modify")
_DATES = ("LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait for a store."""

    timeout_s: float = 30.0  # of an attempt that brings next to nothing
    least_bytes_per_s: float = 1 << 20  # an attempt that brings more may take longer
    attempts: int = 6
    first_wait_s: float = 0.5  # doubles from attempt to attempt
    longest_wait_s: float = 20.0

    def limit_s(self, size: int) -> float:
        """Return how long an attempt to read so many bytes may take."""
        return self.timeout_s + size / self.least_bytes_per_s

    def wait_s(self, attempt: int) -> float:
        """Return how long to wait after an attempt, from 1 on: by chance, so that processes don't come all at once."""
        longest = min(self.first_wait_s * 2 ** (attempt - 1), self.longest_wait_s)
        return longest * random.uniform(0.5, 1.0)


class ShortAnswer(Exception):
    """Say that an answer holds less than was asked for."""


@dataclass(frozen=True)
class File:
    """A file of a store. stamp: changes with its content; empty where the store has nothing of the kind.

    The name of a fetched copy is hashed from its repr: renaming the class or a field would fetch everything again.
    """

    name: str  # below the folder
    size: int
    stamp: str


class ObjectStore:
    """A folder on an object store. Picklable; safe in threads and after a fork."""

    def __init__(self, url: str, patience: RetryPolicy | None = None) -> None:
        self.url, self.patience = url.rstrip("/"), patience or RetryPolicy()
        # process, file system, root, and what holds back its other threads
        self._opened: tuple[int, Any, str, AbstractContextManager[Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.url, self.patience)

    def read(self, name: str, start: int, stop: int, least: int | None = None) -> bytes:
        """Return bytes of a file. least: how many there must be, all unless given; a file may end before `stop`.

        Raises: FileNotFoundError where there is no such file; TrainingFault after the last attempt.
        """
        needed = stop - start

        def call() -> bytes:
            with self._system() as (system, root):
                content = system.cat_file(f"{root}/{name}", start=start, end=stop)
            if len(content) < (needed if least is None else least):
                raise ShortAnswer(f"the answer ended after {len(content):,} bytes of {needed:,}")
            if len(content) > needed:
                raise TrainingFault(
                    f"{shown_url(self.url)}/{name}: asked for bytes {start:,} to {stop:,}, the answer has {len(content):,} "
                    "bytes: this server does not support range requests. Use one that does, or copy the cache to a folder"
                )
            return bytes(content)

        return self._patiently(f"{name}, bytes {start:,} to {stop:,}", call, needed)

    def file(self, name: str) -> File:
        """Look at a file. Raises FileNotFoundError; TrainingFault after the last attempt."""

        def call() -> File:
            with self._system() as (system, root):
                return _file(name, system.info(f"{root}/{name}"))

        return self._patiently(name, call)

    def files(self, folder: str) -> list[File]:
        """Look at all files of a folder; there are none where it is not there. Raises TrainingFault."""

        def call() -> list[File]:
            with self._system() as (system, root):
                listing = system.ls(f"{root}/{folder}", detail=True)
            names = [
                (str(entry["name"]).rstrip("/").rpartition("/")[2], entry)
                for entry in listing
                if entry["type"] == "file"
            ]
            return sorted((_file(f"{folder}/{name}", entry) for name, entry in names), key=lambda entry: entry.name)

        try:
            return self._patiently(f"{folder}/", call)
        except FileNotFoundError:
            return []

    @contextmanager
    def _system(self) -> Iterator[tuple[Any, str]]:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            from fsspec.core import url_to_fs

            # not one that is kept for all: it may be that of a process before a fork, or hang
            system, root = url_to_fs(self.url, skip_instance_cache=True)
            names = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
            turns = threading.Lock() if names & _ONE_BY_ONE else nullcontext()
            opened = self._opened = (os.getpid(), system, str(root).rstrip("/"), turns)
        with opened[3]:
            yield opened[1], opened[2]

    def _patiently(self, what: str, call: Callable[[], T], size: int = 0) -> T:
        started, last = time.monotonic(), ""
        limit_s, attempts = self.patience.limit_s(size), self.patience.attempts
        for attempt in range(1, attempts + 1):
            try:
                return _within(limit_s, call)
            # asking again does not bring what is not there
            except (*GONE, TrainingFault):
                raise
            except TimeoutError as error:
                last = str(error) or "the store timed out"
            except Exception as error:
                last = f"{type(error).__name__}: {error}"
            self._opened = None
            if attempt < attempts:
                if attempt >= _SAID_FROM:
                    say_to_all(f"cache: {shown_url(self.url)}/{what}: attempt {attempt} of {attempts} failed: {last}")
                time.sleep(self.patience.wait_s(attempt))
        raise TrainingFault(
            f"{shown_url(self.url)}/{what}: given up after {attempts} attempts in {time.monotonic() - started:.0f} s. "
            f"The last one: {last}. Start again once the store answers (a run continues from its last checkpoint with "
            f"{option('save.resume')}), or copy the cache to a folder and name that with {option('data.cache_dir')}"
        )


def in_parallel(calls: Sequence[Callable[[], T]], threads: int = THREADS) -> list[T]:
    """Return what calls return, in their order. Raises the first error that is met; what else runs is not waited for."""
    if len(calls) <= 1:
        return [call() for call in calls]
    results: list[Any] = [None] * len(calls)
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    numbers, lock = iter(range(len(calls))), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = calls[number]()
                done.put(None)
            except BaseException as error:
                done.put(error)
                return

    for _ in range(min(threads, len(calls))):
        threading.Thread(target=work, daemon=True).start()
    for _ in calls:
        if error := done.get():
            for _ in numbers:  # nobody begins another
                pass
            raise error
    return results


def say_to_all(text: str) -> None:
    """Say something from wherever we are: the main process or a worker of the loader."""
    print(text, file=sys.stderr, flush=True)


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """Call, and leave the call alone when it takes too long. Raises TimeoutError, and what the call raises."""
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = answer.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _file(name: str, info: Mapping[str, Any]) -> File:
    stamps = [f"{key}={info[key]}" for key in _STAMPS if info.get(key) is not None]
    stamps = stamps or [f"{key}={info[key]}" for key in _DATES if info.get(key) is not None][:1]
    if info.get("size") is None:
        raise OSError("the store does not say how large it is")
    return File(name, int(info["size"]), " ".join(stamps))
