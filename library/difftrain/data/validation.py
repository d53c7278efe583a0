"""Validation batches: every held-out record once, with the same draws at every step, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, DataFault, Draw, FeatureSpec, Reject, Tokenize
from difftrain.data.loader import Share, data_loader, items_of, num_workers
from difftrain.data.prepare import Data, validation_seed
from difftrain.data.recipe import recipes_of
from difftrain.data.samples import SampleMaker
from difftrain.data.tables import BucketRows, Tables
from difftrain.diffusion.permutation import Permutation

log = logging.getLogger("difftrain")


class Chunks:
    """The held-out records of each bucket, cut into chunks of at most one global batch; chunks in keyed order.

    global_batches: of each data set.
    max_steps keeps the first so many chunks: the same records on any number of ranks with the same global batch.
    """

    def __init__(self, tables: Tables, seed: int, global_batches: tuple[int, ...], max_steps: int | None) -> None:
        self._tables, self._batches = tables, [global_batches[rows.dataset] for rows in tables.validation]
        counts = [-(-rows.records // batch) for rows, batch in zip(tables.validation, self._batches, strict=True)]
        self._ends = np.cumsum(counts)
        total = sum(counts)
        self._order = Permutation(total, seed, "validation chunks") if total else None
        self._length = min(total, max_steps or total)

    def __len__(self) -> int:
        return self._length

    @property
    def records(self) -> int:
        """Return how many records all chunks have."""
        return sum(len(self.rows(n)[1]) for n in range(len(self)))

    def rows(self, n: int) -> tuple[BucketRows, np.ndarray]:
        """Return bucket and table rows of chunk n."""
        assert self._order is not None
        slot = self._order(n)
        which = int(np.searchsorted(self._ends, slot, side="right"))
        held, batch = self._tables.validation[which], self._batches[which]
        start = (slot - int(self._ends[which - 1] if which else 0)) * batch
        stop = min(start + batch, held.records)
        return held, np.arange(held.first + start, held.first + stop)


class Pick(Protocol):
    """Say what the items of a rank are made of."""

    def rows(self, n: int) -> tuple[BucketRows, np.ndarray]: ...


class Slices:
    """This rank's micro batches of chunks: item n is micro batch n % accumulation of chunk n // accumulation."""

    def __init__(self, chunks: Chunks, share: Share) -> None:
        self._chunks, self._share = chunks, share

    def rows(self, n: int) -> tuple[BucketRows, np.ndarray]:
        """Return bucket and table rows of item n."""
        chunk, micro = divmod(n, self._share.accumulation)
        held, rows = self._chunks.rows(chunk)
        return held, rows[self._share.part(micro, held.dataset)]


class HeldOut(Dataset[Any]):
    """Item n is a micro batch of the rows that are picked for it; where nothing is left of it, its rejects."""

    def __init__(self, maker: SampleMaker, tables: Tables, pick: Pick) -> None:
        self._maker, self._tables, self._pick = maker, tables, pick
        self.forks = maker.forks

    def __getitem__(self, n: int) -> Batch | list[Reject] | DataFault:
        held, rows = self._pick.rows(n)
        ids, keys = self._tables.take(rows)
        draws = [Draw(record_id, key, 0) for record_id, key in zip(ids, keys, strict=True)]
        samples, kept, rejects = self._maker.samples(held.bucket, draws, 0, spare=None)
        try:
            return self._maker.collate(held.bucket, samples, kept, rejects) if samples else rejects
        except DataFault as fault:
            return fault  # raised by the parent, without the worker's traceback around it


class ValidationBatches:
    """Iterate over this rank's part, as often as wanted. Ranks may have different numbers of batches, or none.

    items: of the data set, that are this rank's. records: that all ranks look at together, as long as all can be read.
    """

    def __init__(self, dataset: HeldOut, items: range, records: int, workers: int) -> None:
        self._dataset, self._items, self.records = dataset, items, records
        self._workers = min(workers, len(items))

    def __iter__(self) -> Iterator[Batch]:
        for item in items_of(data_loader(self._dataset, self._items, self._workers, self._dataset.forks)):
            batch = item if isinstance(item, Batch) else None
            for reject in batch.rejects if batch else item:
                log.warning("left out of the validation: %s: %s", reject.path, reject.reason)
            if batch is not None:
                yield batch


def plain_maker(data: Data, tokenize: Tokenize, features: FeatureSpec, cfg: TrainConfig) -> SampleMaker:
    """Return what makes samples as they stand: occurrence 0, no flip, centre crop, and no draw that only trains."""
    plain = tuple(recipe.plain() for recipe in recipes_of(cfg, data.index.sources))
    kept = {name: spec for name, spec in features.draws.items() if not spec.trains}
    return SampleMaker(data.index, plain, replace(features, draws=kept), tokenize, validation_seed(cfg), data.store)


def validation_batches(
    data: Data,
    tokenize: Tokenize,
    features: FeatureSpec,
    cfg: TrainConfig,
    dp_rank: int,
    dp_size: int,
    *,
    local_size: int | None = None,
) -> ValidationBatches:
    """Return this rank's part of the held-out records: occurrence 0, no flip, centre crop, the caption as it stands."""
    share = Share(dp_rank, dp_size, cfg.batch_sizes, cfg.training.accumulation)
    maker = plain_maker(data, tokenize, features, cfg)
    chunks = Chunks(data.tables, validation_seed(cfg), share.global_batches, cfg.validation.max_steps)
    dataset = HeldOut(maker, data.tables, Slices(chunks, share))
    items = range(len(chunks) * share.accumulation)
    return ValidationBatches(dataset, items, chunks.records, num_workers(cfg.data.workers, local_size))
