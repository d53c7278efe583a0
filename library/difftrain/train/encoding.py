"""Encoding what is missing of a cache: workers decode ahead, the device encodes, a thread writes what it made."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from difftrain.contracts import Bucket, Parts, TrainingFault
from difftrain.data.cache.decoding import Decoding, Piece
from difftrain.data.cache.format import Item, pack, reject
from difftrain.data.cache.guard import HandedOut, pieces_of
from difftrain.data.cache.storage import Unstorable, kept_rows, stored
from difftrain.data.cache.wanted import Wanted
from difftrain.device import host
from difftrain.train.cache_plan import Wish, duration

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.device import Device

log = logging.getLogger("difftrain")
SAY_EVERY_S = 10.0
TURN_S = 5e-4
BATCHES_A_WORKER = 16  # of captions: fewer are tokenised before a worker has started


class Sink(Protocol):
    """Where entries go: a segment on disk, or memory."""

    def append(self, items: Sequence[Item]) -> None: ...


@dataclass
class Job:
    """One encoder's work on this rank. missing: of the wanted entries, (N,) bool. todo: batches with a missing entry.

    passed: what could not be read now, by address, and why: nothing is noted of it, and the next start tries again.
    """

    wish: Wish
    wanted: Wanted
    missing: np.ndarray
    todo: np.ndarray
    passed: dict[bytes, str] = field(default_factory=dict)

    @classmethod
    def of(cls, wish: Wish, wanted: Wanted, missing: np.ndarray) -> Job:
        """Find the batches that are to be encoded."""
        size, found, first, start = wanted.batch_size, [np.zeros(0, np.int64)], 0, 0
        for _, count in wanted.buckets():
            batches = -(-count // size)
            cells = np.zeros(batches * size, dtype=bool)
            cells[:count] = missing[start : start + count]
            found.append(first + np.flatnonzero(cells.reshape(batches, size).any(axis=1)))
            first, start = first + batches, start + count
        return cls(wish, wanted, missing, np.concatenate(found))


def encode(
    job: Job,
    decoding: Decoding,
    handed: HandedOut,
    sink: Sink,
    progress: Progress,
    *,
    parts: Parts,
    device: Device,
    precision: str,
    workers: int,
    stop: threading.Event,
) -> None:
    """Encode what this rank is handed. A kill loses the batch in hand, and the one that is being written.

    stop: set where another rank has failed, whose error is the one to be seen. Raises TrainingFault.
    """
    encoder = job.wish.encoder
    worth = len(job.todo) if encoder.source == "pixels" else len(job.todo) // BATCHES_A_WORKER
    pieces = pieces_of(decoding, handed, min(workers, worth))
    with awake(parts, encoder.modules, device), torch.no_grad(), device.autocast(precision), Behind() as writing:
        for piece in progress.timed(pieces):
            if stop.is_set():
                return
            made: dict[str, Tensor] = {}
            if piece.batch is not None:
                found = encoder.encode(device.to_device(piece.batch))
                names = {*encoder.features, *(mask for mask in encoder.masks.values() if mask in found)}
                made = {name: found[name].detach().cpu() for name in names}
                _check_shapes(job, piece, made)
            passed = _passed(job, piece)
            job.passed |= passed
            progress.passed += len(passed)
            writing.put(partial(_commit, job, piece, made, sink, progress))


def _commit(job: Job, piece: Piece, made: dict[str, Tensor], sink: Sink, progress: Progress) -> None:
    """Write those entries of a batch that are missing. A redo encodes the same batch, so it writes the same bytes."""
    items = [
        _item(job, piece, place, row, made)
        for place, row in enumerate(piece.rows if piece.batch is not None else ())
        if job.missing[row]
    ]
    for row, (name, reason) in piece.rejected.items():
        if job.missing[row]:
            items.append(reject(_address(job, row), name, reason))
    if items:
        sink.append(items)
    rows = job.wanted.rows(piece.number)
    progress.add(int(job.missing[rows.start : rows.stop].sum()))


def _item(job: Job, piece: Piece, place: int, row: int, made: dict[str, Tensor]) -> Item:
    """Pack what was made of one sample; what no dtype can hold is rejected where it is of a picture."""
    wish, meta, batch = job.wish, piece.metas[place], piece.batch
    assert batch is not None
    try:
        features = []
        for name, dtype in wish.dtypes.items():
            by = wish.encoder.masks.get(name, "")
            mask = made[by] if by in made else batch.features.get(by)  # of what came out, where the encoder says it
            rows = None if mask is None else kept_rows(mask[place])
            features.append(stored(name, made[name][place], dtype, rows))
    except Unstorable as error:
        finite = all(bool(torch.isfinite(each[place]).all()) for each in made.values())
        if finite or wish.encoder.source == "caption":
            what = meta.get("name") or meta.get("caption")
            raise TrainingFault(f"cache of {wish.name}: {what}: {error}") from None
        return reject(_address(job, row), str(meta.get("name", "")), f"not finite: {error}")
    return Item(_address(job, row), pack(features, meta))


def _address(job: Job, row: int) -> bytes:
    return job.wanted.addresses[row].tobytes()


def _passed(job: Job, piece: Piece) -> dict[bytes, str]:
    """Return what of a batch could not be read now, by address, and why."""
    if not piece.passed:
        return {}
    left = [row for row in job.wanted.rows(piece.number) if row not in piece.rows and row not in piece.rejected]
    records = dict.fromkeys(int(job.wanted.entries[row]["record"]) for row in left)
    reasons = dict(zip(records, (each.reason for each in piece.passed), strict=True))
    return {_address(job, row): reasons[int(job.wanted.entries[row]["record"])] for row in left}


def _check_shapes(job: Job, piece: Piece, made: dict[str, Tensor]) -> None:
    bucket: Bucket = job.wanted.bucket(piece.number)
    for name, feature in job.wish.encoder.features.items():
        said, wanted = made[name], (len(piece.rows), *feature.shape(bucket))
        if tuple(said.shape) != wanted or said.dtype != getattr(torch, feature.dtype):
            raise TypeError(
                f"the encoder made {name} of {(tuple(said.shape), said.dtype)}, announced {(wanted, feature.dtype)}"
            )


class Behind:
    """Do one thing after another in a thread, with at most one waiting; its errors are raised here.

    An encoder on the host that comes back from an operator waits for this thread's Python, up to 5 ms by default.
    So meanwhile threads take turns more often.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "cache")
        self._pending: Future[None] | None = None
        self._interval = sys.getswitchinterval()

    def __enter__(self) -> Behind:
        sys.setswitchinterval(TURN_S)
        return self

    def put(self, action: Callable[[], None]) -> None:
        """Hand on an action, once the one before it is done."""
        self.wait()
        self._pending = self._pool.submit(action)

    def wait(self) -> None:
        """Wait for the last one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
            else:
                with suppress(Exception):  # the first error is the one to be seen
                    self.wait()
        finally:
            self._pool.shutdown()
            sys.setswitchinterval(self._interval)


@contextmanager
def awake(parts: Parts, names: Iterable[str], device: Device) -> Iterator[None]:
    """Bring frozen parts to the device for a while, with their weights; afterwards they rest again."""
    here = sorted(names)
    try:
        for name in here:
            parts.wake(name)
            parts.frozen[name].to(device.torch_device)
        yield
    finally:
        for name in here:
            parts.rest(name)
        host.give_back()


class Progress:
    """Say every few seconds how far all ranks together have come, and how long it will take."""

    def __init__(self, name: str, total: int, tally: Callable[[int], int]) -> None:
        self._name, self._total, self._tally = name, total, tally
        self._began = self._said = time.monotonic()
        self._waited = 0.0
        self.done = 0  # of this rank
        self.passed = 0  # of them, what could not be read now

    def timed(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Hand pieces through, and measure how long they are waited for."""
        while True:
            start = time.monotonic()
            piece = next(pieces, None)
            self._waited += time.monotonic() - start
            if piece is None:
                return
            yield piece

    def add(self, count: int) -> None:
        """Count entries that are written."""
        self.done += count
        done, now = self._tally(count), time.monotonic()
        if now - self._said < SAY_EVERY_S:
            return
        self._said, rate = now, done / (now - self._began)
        left = duration((self._total - done) / rate) if rate else "?"
        log.info(
            "cache of %s: %s of %s, %.1f a second, %s left", self._name, f"{done:,}", f"{self._total:,}", rate, left
        )

    def end(self) -> None:
        """Sum up."""
        took = max(time.monotonic() - self._began, 1e-9)
        done = self._tally(0)
        waited = f", {self._waited / took:.0%} of this rank's time waiting for what is decoded" if self.done else ""
        if self.passed:
            waited += f"; {self.passed:,} of this rank's could not be read, and are tried again by the next start"
        log.info(
            "cache of %s: %s entries %s in %s, %.1f a second%s",
            self._name,
            f"{done:,}",
            "looked at" if self.passed else "encoded",
            duration(took),
            done / took,
            waited,
        )
