"""What a model is measured on: held-out records and evaluation sets, each record once with the same draws at every step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np
from torch.utils.data import Dataset

from difftrain.config import TrainConfig
from difftrain.config.schema.sections import DatasetSection, EvalSetSection
from difftrain.contracts import Batch, DataFault, Draw, FeatureSpec, Reject, Tokenize
from difftrain.data.features import NOTHING_CACHED
from difftrain.data.index.index import DATABASE, Index, connect
from difftrain.data.loader import data_loader, items_of, num_workers
from difftrain.data.plan.plan import RankShare
from difftrain.data.plan.tables import BucketRows, PlanTables
from difftrain.data.prepare import Data, built_index, make_tables, open_data, refuse, trusted_index, validation_seed
from difftrain.data.recipe import recipes_of
from difftrain.data.samples import SampleMaker
from difftrain.diffusion.permutation import Permutation

log = logging.getLogger("difftrain")
Log = Callable[[str], None]
_SAME_BYTES = "SELECT count(*) FROM main.records WHERE content IN (SELECT content FROM trained.records)"
_SAME_PLACE = """
SELECT r.row FROM main.records r JOIN main.files f ON f.id = r.file WHERE f.source = ? AND (f.path, coalesce(r.member, ''))
    IN (SELECT o.path, coalesce(t.member, '') FROM trained.records t JOIN trained.files o ON o.id = t.file WHERE o.source = ?)
"""
SEED = 0  # of the draws: the same for every run, whatever its own, so that any two can be compared
HELD_OUT = "validation"  # the name of the held-out part of the training set


class BucketBatches:
    """Buckets cut into batches of fixed composition, in the order of their tables: each of one bucket.

    batch_sizes: of each data set. The world size appears nowhere, so that sums over all are of the same terms.
    """

    def __init__(self, buckets: tuple[BucketRows, ...], batch_sizes: tuple[int, ...]) -> None:
        self._buckets, self._sizes = buckets, [batch_sizes[rows.group] for rows in buckets]
        counts = [-(-rows.records // size) for rows, size in zip(self._buckets, self._sizes, strict=True)]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, n: int) -> tuple[BucketRows, np.ndarray]:
        """Return bucket and table rows of batch n."""
        which = int(np.searchsorted(self._ends, n, side="right"))
        bucket, size = self._buckets[which], self._sizes[which]
        start = (n - int(self._ends[which - 1] if which else 0)) * size
        return bucket, np.arange(bucket.first + start, bucket.first + min(start + size, bucket.records))


class HeldOutBatches:
    """This rank's micro batches of the held-out records: number n is micro batch n % accumulation of a global batch.

    Global batches are of one bucket, the last one of each smaller, and come in keyed order. max_steps keeps the first so
    many: the same records on any number of ranks with the same global batch.
    """

    def __init__(self, tables: PlanTables, seed: int, share: RankShare, max_steps: int | None) -> None:
        self._batches, self._share = BucketBatches(tables.validation, share.global_batches), share
        total = len(self._batches)
        self._order = Permutation(total, seed, "validation chunks") if total else None
        self._length = min(total, max_steps or total) * share.accumulation

    def __len__(self) -> int:
        return self._length

    def rows(self, n: int) -> tuple[BucketRows, np.ndarray]:
        """Return bucket and table rows of micro batch n; the rank may have none of the global batch's."""
        assert self._order is not None
        step, micro = divmod(n, self._share.accumulation)
        bucket, rows = self._batches.rows(self._order(step))
        return bucket, rows[self._share.part(micro, bucket.dataset)]


class EvaluationBatches(Dataset[Any]):
    """Item n is a micro batch of the rows that are picked for it; where nothing is left of it, its rejects."""

    def __init__(self, maker: SampleMaker, tables: PlanTables, batches: HeldOutBatches | BucketBatches) -> None:
        self._maker, self._tables, self._batches = maker, tables, batches
        self.forks = maker.forks

    def __getitem__(self, n: int) -> Batch | list[Reject] | DataFault:
        bucket, rows = self._batches.rows(n)
        ids, keys = self._tables.take(rows)
        draws = [Draw(record_id, key, 0) for record_id, key in zip(ids, keys, strict=True)]
        samples, kept, rejects = self._maker.samples(bucket.bucket, draws, 0, spare=None)
        try:
            return self._maker.collate(bucket.bucket, samples, kept, rejects) if samples else rejects
        except DataFault as fault:
            return fault  # raised by the parent, without the worker's traceback around it


@dataclass(frozen=True)
class EvaluationSet:
    """Records that a model is measured on: every one once, with the same draws at every step.

    cfg: the run's, with this set's data. data: with its cache, where there is one. seed: of the draws. held_out: the part
    of the training set that is not trained on, in global batches of training's size; else data of its own, all of it.
    """

    name: str
    cfg: TrainConfig
    data: Data
    seed: int
    held_out: bool = False
    rejects: tuple[Reject, ...] = ()

    def maker(self, tokenize: Tokenize, features: FeatureSpec) -> SampleMaker:
        """Return what makes samples as they stand: occurrence 0, no flip, centre crop, and no draw that only trains."""
        plain = tuple(recipe.plain() for recipe in recipes_of(self.cfg, self.data.index.sources))
        kept = {name: spec for name, spec in features.draws.items() if not spec.trains}
        return SampleMaker(self.data.index, plain, replace(features, draws=kept), tokenize, self.seed, self.data.store)

    def uncached(self) -> EvaluationSet:
        """Return the same records, made from pixels, not from what is cached of them."""
        return replace(self, data=replace(self.data, store=NOTHING_CACHED))

    def batches(
        self,
        tokenize: Tokenize,
        features: FeatureSpec,
        dp_rank: int = 0,
        dp_size: int = 1,
        local_size: int | None = None,
    ) -> Iterator[Batch]:
        """Yield this rank's micro batches. Ranks may have different numbers of them, or none.

        Of held-out records a rank takes its part of each global batch, of other data batch number n on rank n % dp_size.
        """
        # which rows make up this rank's batches
        tables, cfg = self.data.tables, self.cfg
        rows: HeldOutBatches | BucketBatches
        if self.held_out:
            share = RankShare(dp_rank, dp_size, cfg.batch_sizes, cfg.training.accumulation)
            rows = HeldOutBatches(tables, self.seed, share, cfg.validation.max_steps)
            items = range(len(rows))
        else:
            rows = BucketBatches(tables.training, cfg.batch_sizes)
            items = range(dp_rank, len(rows), dp_size)

        # workers make them; what cannot be read is left out, by its name
        dataset = EvaluationBatches(self.maker(tokenize, features), tables, rows)
        workers = min(num_workers(cfg.data.workers, local_size), len(items))
        for item in items_of(data_loader(dataset, items, workers, dataset.forks)):
            batch = item if isinstance(item, Batch) else None
            for reject in batch.rejects if batch else item:
                log.warning("left out of the validation: %s: %s", reject.path, reject.reason)
            if batch is not None:
                yield batch


def held_out_set(cfg: TrainConfig, data: Data) -> EvaluationSet:
    """Return the part of the training set that is held out, as an evaluation set."""
    return EvaluationSet(HELD_OUT, cfg, data, validation_seed(cfg), held_out=True)


# --- sets with data of their own


def config_of(cfg: TrainConfig, section: EvalSetSection) -> TrainConfig:
    """Return the run's configuration with the data of a set in place of training's.

    Nothing is held out of it, its records are known by their keys alone, and its masks count.
    """
    none: dict[str, Any] = {
        "dirs": (),
        "reg_dirs": (),
        "in_json": None,
        "dataset_class": None,
        "conditioning_dir": None,
        "control_dirs": (),
    }
    datasets = tuple(_plain(dataset, cfg.eval.batch_size) for dataset in section.datasets)
    data = {**none, "dataset_config": section.config, "datasets": datasets, "tar_order": "random"}
    masked = any(
        subset.conditioning_dir or subset.default_mask for dataset in section.datasets for subset in dataset.subsets
    )
    return cfg.model_copy(
        update={
            "data": cfg.data.model_copy(update=data),
            "validation": cfg.validation.model_copy(update={"split": 0.0}),
            "loss": cfg.loss.model_copy(update={"masked": cfg.loss.masked or masked}),
        }
    )


def _plain(dataset: DatasetSection, batch_size: int | None) -> DatasetSection:
    """Return a data set none of which is held out, flipped or there for regularisation: no cache need hold more."""
    subsets = tuple(subset.model_copy(update={"is_reg": False, "flip": False}) for subset in dataset.subsets)
    size = batch_size or dataset.batch_size
    return dataset.model_copy(update={"subsets": subsets, "validation_split": 0.0, "batch_size": size})


def open_set(cfg: TrainConfig, section: EvalSetSection, log: Log) -> EvaluationSet:
    """Bring a set's index and tables up to date, and open them. One process a machine; what it returns is small.

    Raises: as `prepare`.
    """
    here = config_of(cfg, section)
    index = trusted_index(here) if cfg.cache.trust else built_index(here, log)
    make_tables(here, index)
    data = open_data(here, index.folder)
    refuse(here, data)
    placed, rejected = data.tables.count - data.tables.unplaced, index.summary.rejected + data.tables.unplaced
    buckets = len({rows.bucket for rows in data.tables.training})
    log(f"{placed:,} records in {buckets} bucket{'s'[: buckets > 1]}, {rejected:,} rejected")
    data = replace(data, recipes=tuple(recipe.plain() for recipe in data.recipes))  # a cache of it holds no more
    return EvaluationSet(section.name, here, data, SEED)


def common_records(trained: Index, validation: Index) -> int:
    """Count the records of a set whose pictures are trained on, too.

    By their bytes where both indexes know all of them, else by their places in folders that both have.
    """
    alike = [
        (source.ordinal, source.ordinal)
        for source in validation.sources
        for source in trained.sources
        if source.root == source.root
    ]
    by_bytes = trained.summary.verify == validation.summary.verify == "full"
    with contextlib.closing(connect(validation.folder / DATABASE)) as database:
        location = quote(str((trained.folder / DATABASE).absolute()))
        database.execute("ATTACH DATABASE ? AS trained", (f"file:{location}?mode=ro&immutable=1",))
        if by_bytes:
            return int(database.execute(_SAME_BYTES).fetchone()[0])
        rows = {row for pair in alike for (row,) in database.execute(_SAME_PLACE, pair)}
        return len(rows)
