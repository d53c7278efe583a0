"""Encoding one rank's share of a cache: loader workers decode what comes next while the device encodes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from difftrain.contracts import Batch, Encoder, Parts
from difftrain.data.cache.layout import Part
from difftrain.data.cache.places import Folder, Place, Rejected
from difftrain.data.cache.work import CaptionWork, PictureWork, Pieces
from difftrain.data.loader import data_loader, items_of

if TYPE_CHECKING:
    from difftrain.device import Device

log = logging.getLogger("difftrain")
SAY_EVERY_S = 10.0


@dataclass
class Job:
    """One encoder whose features are cached. missing: this rank's share of the parts that are still to be encoded."""

    name: str  # "latents" or "text"
    flag: str
    things: str
    to_disk: bool
    encoder: Encoder
    work: PictureWork | CaptionWork
    _place: Place | None = None
    missing: list[Part] = field(default_factory=list)
    rejected: Rejected = field(default_factory=dict)  # entry -> why it is empty

    @property
    def place(self) -> Place:
        """Return where the features lie, once that is decided."""
        assert self._place is not None
        return self._place

    @place.setter
    def place(self, place: Place) -> None:
        self._place = place

    @property
    def needs(self) -> str:
        """Say how large the cache is."""
        layout = self.work.layout
        each, total = amount(layout.bytes / layout.count), amount(layout.bytes)
        return f"cache of {self.name}: {layout.count:,} {self.things} of {each} on average, {total}"

    @property
    def where(self) -> str:
        """Name where the features lie."""
        return str(self.place.path) if isinstance(self.place, Folder) else "memory"


def amount(size: float) -> str:
    """Write a number of bytes."""
    power = min(3, max(0, int(math.log2(size) // 10))) if size >= 1 else 0
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def encode(job: Job, device: Device, precision: str, parts: Parts, workers: int, stop: threading.Event) -> None:
    """Encode what is missing, part by part. A kill loses the part in hand; those before it are whole.

    stop: set where another rank has failed, whose error is the one to be seen.
    """
    pieces, work = Pieces(job.work, job.missing), job.work
    loader = data_loader(pieces, range(len(pieces)), min(workers, len(pieces)), work.forks)
    progress = Progress(job)
    with moved(parts, job.encoder.modules, device), torch.no_grad(), device.autocast(precision):
        for number, group in itertools.groupby(items_of(loader), key=lambda piece: piece.part.number):
            part = work.layout.parts[number]
            entry, room, rejected = work.layout.entries[part.bucket], job.place.room(part), Rejected()
            for piece in group:
                if stop.is_set():
                    return
                rejected |= piece.rejected
                if piece.batch is not None:
                    batch = device.to_device(piece.batch)
                    for variant in range(work.variants):
                        entry.put(room, piece.rows, variant, job.encoder.encode(mirrored(batch) if variant else batch))
                progress.add(len(piece.rows) + len(piece.rejected))
            job.place.commit(part, room, rejected)
            job.rejected |= {part.first + row: reason for row, reason in rejected.items()}


def mirrored(batch: Batch) -> Batch:
    """Return a batch with its pictures mirrored, as a flip makes them."""
    return dataclasses.replace(batch, features={name: each.flip(-1) for name, each in batch.features.items()})


@contextmanager
def moved(parts: Parts, names: Iterable[str], device: Device) -> Iterator[None]:
    """Bring frozen parts to the device for a while; afterwards they rest on the host again."""
    modules = [parts.frozen[name] for name in names]
    for module in modules:
        module.to(device.torch_device)
    try:
        yield
    finally:
        for module in modules:
            module.to("cpu")


class Progress:
    """Say every few seconds how far this rank has come, and how long it will take."""

    def __init__(self, job: Job) -> None:
        self._job, self._total = job, sum(part.count for part in job.missing)
        self._done, self._began = 0, time.monotonic()
        self._said = self._began

    def add(self, count: int) -> None:
        """Count what is done."""
        self._done += count
        now = time.monotonic()
        if now - self._said < SAY_EVERY_S and self._done < self._total:
            return
        self._said, took = now, max(now - self._began, 1e-9)
        left = (self._total - self._done) * took / self._done
        log.info(
            "cache of %s: %d of this rank's %d %s encoded, %.1f a second, %.1f min left",
            self._job.name,
            self._done,
            self._total,
            self._job.things,
            self._done / took,
            left / 60,
        )
