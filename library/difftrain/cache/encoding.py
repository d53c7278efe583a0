"""Encoding what is missing of a cache: workers decode ahead, the device encodes, a thread writes what it made."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch

from difftrain.cache.decoding import BatchQueue, DecodedBatch, DecodingDataset, decoded_batches
from difftrain.cache.manifest.manifest import CacheManifest
from difftrain.cache.request import CacheRequest, duration_text
from difftrain.cache.store.format import PackedEntry, pack, reject
from difftrain.cache.store.segment import EntrySink
from difftrain.cache.store.storage import Unstorable, kept_rows, stored
from difftrain.contracts import CAPTION, Bucket, Parts, TrainingFault
from difftrain.device import host

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.device import Device

log = logging.getLogger("difftrain")
LOG_EVERY_S = 10.0
SWITCH_INTERVAL_S = 5e-4
BATCHES_A_WORKER = 16  # of captions: fewer are tokenised before a worker has started


@dataclass
class BuildJob:
    """One encoder's work on this rank. missing: of the wanted entries, (N,) bool. todo: batches with a missing entry.

    passed: what could not be read now, by address, and why: nothing is noted of it, and the next start tries again.
    """

    request: CacheRequest
    manifest: CacheManifest
    missing: np.ndarray
    todo: np.ndarray
    passed: dict[bytes, str] = field(default_factory=dict)

    @classmethod
    def of(cls, request: CacheRequest, manifest: CacheManifest, missing: np.ndarray) -> BuildJob:
        """Find the batches that are to be encoded."""
        size, counts, first, start = manifest.batch_size, [np.zeros(0, np.int64)], 0, 0
        for _, count in manifest.buckets():
            batches = -(-count // size)
            cells = np.zeros(batches * size, dtype=bool)
            cells[:count] = missing[start : start + count]
            counts.append(first + np.flatnonzero(cells.reshape(batches, size).any(axis=1)))
            first, start = first + batches, start + count
        return cls(request, manifest, missing, np.concatenate(counts))


def encode(
    job: BuildJob,
    decoding: DecodingDataset,
    batch_queue: BatchQueue,
    sink: EntrySink,
    progress: BuildProgress,
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
    encoder = job.request.encoder
    # captions are tokenised faster than a worker starts
    worth = len(job.todo) // BATCHES_A_WORKER if encoder.source == CAPTION else len(job.todo)

    # the device encodes a batch while the one before is written and the next ones are decoded
    pieces = decoded_batches(decoding, batch_queue, min(workers, worth))
    with (
        on_device(parts, encoder.modules, device),
        torch.no_grad(),
        device.autocast(precision),
        BackgroundWriter() as writing,
    ):
        for piece in progress.timed(pieces):
            if stop.is_set():
                return
            made: dict[str, Tensor] = {}
            if piece.batch is not None:
                encoded = encoder.encode(device.to_device(piece.batch))
                names = {*encoder.features, *(mask for mask in encoder.masks.values() if mask in encoded)}
                made = {name: encoded[name].detach().cpu() for name in names}
                _check_shapes(job, piece, made)
            passed = _unread_of(job, piece)
            job.passed |= passed
            progress.passed += len(passed)
            writing.put(partial(_write_batch, job, piece, made, sink, progress))


def _write_batch(
    job: BuildJob, piece: DecodedBatch, made: dict[str, Tensor], sink: EntrySink, progress: BuildProgress
) -> None:
    """Write those entries of a batch that are missing. A redo encodes the same batch, so it writes the same bytes."""
    items = [
        _entry(job, piece, position, row, made)
        for position, row in enumerate(piece.rows if piece.batch is not None else ())
        if job.missing[row]
    ]
    for row, (name, reason) in piece.rejected.items():
        if job.missing[row]:
            items.append(reject(_address(job, row), name, reason))
    if items:
        sink.append(items)
    rows = job.manifest.rows(piece.number)
    progress.add(int(job.missing[rows.start : rows.stop].sum()))


def _entry(job: BuildJob, piece: DecodedBatch, position: int, row: int, made: dict[str, Tensor]) -> PackedEntry:
    """Pack what was made of one sample; what no dtype can hold is rejected where it is of a picture."""
    request, meta, batch = job.request, piece.metas[position], piece.batch
    assert batch is not None
    try:
        features = []
        for name, dtype in request.dtypes.items():
            by = request.encoder.masks.get(name, "")
            mask = made[by] if by in made else batch.features.get(by)  # of what came out, where the encoder says it
            rows = None if mask is None else kept_rows(mask[position])
            features.append(stored(name, made[name][position], dtype, rows))
    except Unstorable as error:
        finite = all(bool(torch.isfinite(tensor[position]).all()) for tensor in made.values())
        if finite or request.encoder.source == CAPTION:
            what = meta.get("name") or f"the caption {str(meta.get('caption', ''))[:200]!r}"
            raise TrainingFault(f"cache of {request.name}: {what}: {error}") from None
        return reject(_address(job, row), str(meta.get("name", "")), f"not finite, made by {request.name}: {error}")
    return PackedEntry(_address(job, row), pack(features, meta))


def _address(job: BuildJob, row: int) -> bytes:
    return job.manifest.addresses[row].tobytes()


def _unread_of(job: BuildJob, piece: DecodedBatch) -> dict[bytes, str]:
    """Return what of a batch could not be read now, by address, and why."""
    if not piece.passed:
        return {}
    left = [row for row in job.manifest.rows(piece.number) if row not in piece.rows and row not in piece.rejected]
    records = dict.fromkeys(int(job.manifest.entries[row]["record"]) for row in left)
    reasons = dict(zip(records, (reject.reason for reject in piece.passed), strict=True))
    return {_address(job, row): reasons[int(job.manifest.entries[row]["record"])] for row in left}


def _check_shapes(job: BuildJob, piece: DecodedBatch, made: dict[str, Tensor]) -> None:
    bucket: Bucket = job.manifest.bucket(piece.number)
    for name, feature in job.request.encoder.features.items():
        value, shape = made[name], (len(piece.rows), *feature.shape(bucket))
        if tuple(value.shape) != shape or value.dtype != getattr(torch, feature.dtype):
            raise TypeError(
                f"the encoder made {name} of {(tuple(value.shape), value.dtype)}, announced {(shape, feature.dtype)}"
            )


class BackgroundWriter:
    """Do one thing after another in a thread, with at most one waiting; its errors are raised here.

    An encoder on the host that comes back from an operator waits for this thread's Python, up to 5 ms by default.
    So meanwhile threads take turns more often.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "cache")
        self._pending: Future[None] | None = None
        self._interval = sys.getswitchinterval()

    def __enter__(self) -> BackgroundWriter:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
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
def on_device(parts: Parts, names: Iterable[str], device: Device) -> Iterator[None]:
    """Bring frozen parts to the device for a while, with their weights; afterwards they are offloaded again."""
    here = sorted(names)
    try:
        for name in here:
            parts.load(name)
            parts.frozen[name].to(device.torch_device)
        yield
    finally:
        for name in here:
            parts.offload(name)
        host.give_back()


class BuildProgress:
    """Say every few seconds how far all ranks together have come, and how long it will take."""

    def __init__(self, name: str, total: int, tally: Callable[[int], int]) -> None:
        self._name, self._total, self._tally = name, total, tally
        self._began = self._reported_at = time.monotonic()
        self._waited = 0.0
        self.done = 0  # of this rank
        self.passed = 0  # of them, what could not be read now

    def timed(self, pieces: Iterator[DecodedBatch]) -> Iterator[DecodedBatch]:
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
        if now - self._reported_at < LOG_EVERY_S:
            return
        self._reported_at, rate = now, done / (now - self._began)
        left = duration_text((self._total - done) / rate) if rate else "?"
        log.info(
            "cache of %s: %s of %s, %.1f a second, %s left", self._name, f"{done:,}", f"{self._total:,}", rate, left
        )

    def end(self) -> None:
        """Sum up."""
        took = max(time.monotonic() - self._began, 1e-9)
        done = self._tally(0)
        waited = f", {self._waited / took:.0%} of this rank's time waiting for decoding" if self.done else ""
        if self.passed:
            waited += f"; {self.passed:,} of this rank could not be read; the next start tries again"
        log.info(
            "cache of %s: %s entries %s in %s, %.1f a second%s",
            self._name,
            f"{done:,}",
            "looked at" if self.passed else "encoded",
            duration_text(took),
            done / took,
            waited,
        )
