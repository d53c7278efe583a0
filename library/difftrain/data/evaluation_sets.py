"""Evaluation sets: every record of them once at each resolution, with the same draws at every step, on any number of ranks.

A set is a data set TOML of its own, prepared as training's data are; nothing of it is drawn but what the loss needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import numpy as np

from difftrain.config import TrainConfig
from difftrain.config.sections import DatasetSection, EvalSetSection
from difftrain.contracts import FeatureSpec, Tokenize
from difftrain.data.index import DATABASE, Index, connect
from difftrain.data.loader import num_workers
from difftrain.data.prepare import Data, built_index, make_tables, open_data, refuse, trusted_index
from difftrain.data.samples import SampleMaker
from difftrain.data.tables import BucketRows, Tables
from difftrain.data.validation import HeldOut, ValidationBatches, plain_maker

Say = Callable[[str], None]
_SAME_BYTES = "SELECT count(*) FROM main.records WHERE content IN (SELECT content FROM trained.records)"
_SAME_PLACE = """
SELECT r.row FROM main.records r JOIN main.files f ON f.id = r.file WHERE f.source = ? AND (f.path, coalesce(r.member, ''))
    IN (SELECT o.path, coalesce(t.member, '') FROM trained.records t JOIN trained.files o ON o.id = t.file WHERE o.source = ?)
"""
SEED = 0  # of the draws: the same for every run, whatever its own, so that any two can be compared


class SetChunks:
    """The records of a set in micro batches of fixed composition: of one bucket, in the order of its table.

    batch_sizes: of each data set. The world size appears nowhere, so that sums over a set are of the same terms.
    """

    def __init__(self, tables: Tables, batch_sizes: tuple[int, ...]) -> None:
        self._buckets = tables.training
        self._sizes = [batch_sizes[rows.dataset] for rows in self._buckets]
        counts = [-(-rows.records // size) for rows, size in zip(self._buckets, self._sizes, strict=True)]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, n: int) -> tuple[BucketRows, np.ndarray]:
        """Return bucket and table rows of micro batch n."""
        which = int(np.searchsorted(self._ends, n, side="right"))
        rows, size = self._buckets[which], self._sizes[which]
        start = (n - int(self._ends[which - 1] if which else 0)) * size
        return rows, np.arange(rows.first + start, rows.first + min(start + size, rows.records))


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
    }
    datasets = tuple(_plain(each, cfg.eval.batch_size) for each in section.datasets)
    data = {**none, "dataset_config": section.config, "datasets": datasets, "tar_order": "random"}
    masked = any(subset.conditioning_dir or subset.default_mask for each in section.datasets for subset in each.subsets)
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


def open_set(cfg: TrainConfig, section: EvalSetSection, log: Say) -> Data:
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
    return replace(data, recipes=tuple(recipe.plain() for recipe in data.recipes))  # a cache of it holds no more


def common_records(trained: Index, held: Index) -> int:
    """Count the records of a set whose pictures are trained on, too.

    By their bytes where both indexes know all of them, else by their places in folders that both have.
    """
    alike = [
        (one.ordinal, other.ordinal) for one in held.sources for other in trained.sources if one.root == other.root
    ]
    by_bytes = trained.summary.verify == held.summary.verify == "full"
    with contextlib.closing(connect(held.folder / DATABASE)) as database:
        place = quote(str((trained.folder / DATABASE).absolute()))
        database.execute("ATTACH DATABASE ? AS trained", (f"file:{place}?mode=ro&immutable=1",))
        if by_bytes:
            return int(database.execute(_SAME_BYTES).fetchone()[0])
        found = {row for pair in alike for (row,) in database.execute(_SAME_PLACE, pair)}
        return len(found)


def set_batches(
    data: Data,
    tokenize: Tokenize,
    features: FeatureSpec,
    cfg: TrainConfig,
    section: EvalSetSection,
    dp_rank: int,
    dp_size: int,
    *,
    local_size: int | None = None,
) -> ValidationBatches:
    """Return this rank's micro batches of a set, number n on rank n % dp_size; ranks may have one fewer, or none.

    cfg: the run's. Every record once at each resolution: occurrence 0, no flip, centre crop, the caption as it stands.
    """
    here = config_of(cfg, section)
    chunks = SetChunks(data.tables, here.batch_sizes)
    dataset = HeldOut(set_maker(data, tokenize, features, here), data.tables, chunks)
    items = range(dp_rank, len(chunks), dp_size)
    records = sum(rows.records for rows in data.tables.training)
    return ValidationBatches(dataset, items, records, num_workers(cfg.data.workers, local_size))


def set_maker(data: Data, tokenize: Tokenize, features: FeatureSpec, here: TrainConfig) -> SampleMaker:
    """Return what makes a set's samples. here: of config_of."""
    return replace(plain_maker(data, tokenize, features, here), seed=SEED)
