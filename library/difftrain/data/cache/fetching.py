"""Asking an object store for bytes: every attempt has a time-out, failed ones are repeated, then the store is named.

A call into a file system of fsspec's may never return, and nothing can end it from outside. So each runs in a thread of its
own that nobody has to wait for; the next attempt gets a new connection, and so does a process that was forked.
"""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from difftrain.config.stores import shown
from difftrain.contracts import TrainingFault

T = TypeVar("T")
THREADS = 8  # requests of a process at once
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ONE_BY_ONE = {"ftp", "sftp", "ssh", "smb"}  # file systems whose threads share one connection
_SAID_FROM = 2  # attempt
# what stores call that which changes with a file's content; dates only where there is nothing else
_STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "blob_id", "mtime", "modify")
_DATES = ("LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class Patience:
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


class Short(Exception):
    """Say that an answer holds less than was asked for."""


@dataclass(frozen=True)
class File:
    """A file of a store. stamp: changes with its content; empty where the store has nothing of the kind."""

    name: str  # below the folder
    size: int
    stamp: str


class Store:
    """A folder on an object store. Picklable; safe in threads and after a fork."""

    def __init__(self, url: str, patience: Patience | None = None) -> None:
        self.url, self.patience = url.rstrip("/"), patience or Patience()
        # process, file system, root, and what holds back its other threads
        self._opened: tuple[int, Any, str, AbstractContextManager[Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url, self.patience)

    def read(self, name: str, start: int, stop: int, least: int | None = None) -> bytes:
        """Return bytes of a file. least: how many there must be, all unless given; a file may end before `stop`.

        Raises: FileNotFoundError where there is no such file; TrainingFault after the last attempt.
        """
        wanted = stop - start

        def call() -> bytes:
            with self._system() as (system, root):
                content = system.cat_file(f"{root}/{name}", start=start, end=stop)
            if len(content) < (wanted if least is None else least):
                raise Short(f"the answer ended after {len(content):,} bytes of {wanted:,}")
            if len(content) > wanted:
                raise TrainingFault(
                    f"{shown(self.url)}/{name}: asked for bytes {start:,} to {stop:,}, the answer has {len(content):,} "
                    "bytes: this server does not serve ranges of a file. Use one that does, or copy the cache to a folder"
                )
            return bytes(content)

        return self._patiently(f"{name}, bytes {start:,} to {stop:,}", call, wanted)

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
                found = system.ls(f"{root}/{folder}", detail=True)
            names = [
                (str(each["name"]).rstrip("/").rpartition("/")[2], each) for each in found if each["type"] == "file"
            ]
            return sorted((_file(f"{folder}/{name}", each) for name, each in names), key=lambda each: each.name)

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
            except (*GONE, TrainingFault):
                raise
            except TimeoutError as error:
                last = str(error) or "the store timed out"
            except Exception as error:
                last = f"{type(error).__name__}: {error}"
            self._opened = None
            if attempt < attempts:
                if attempt >= _SAID_FROM:
                    say_to_all(f"cache: {shown(self.url)}/{what}: attempt {attempt} of {attempts} failed: {last}")
                time.sleep(self.patience.wait_s(attempt))
        raise TrainingFault(
            f"{shown(self.url)}/{what}: given up after {attempts} attempts in {time.monotonic() - started:.0f} s. "
            f"The last one: {last}. Start again once the store answers (a run goes on from its last checkpoint with "
            "--resume), or copy the cache to a folder and name that with --cache_dir"
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
