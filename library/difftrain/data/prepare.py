"""Preparing the data: index and planning tables, made by one process a machine, opened by all."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.config import TrainConfig
from difftrain.config.datasets.clips import reads_clips
from difftrain.config.datasets.datasets import datasets_of, subsets_of
from difftrain.config.paths import expanded, is_url, user_cache
from difftrain.config.schema.sections import SizeSection, SubsetSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Bucket, ConfigFault, DataFault, Fault, Reject
from difftrain.data.features import NOTHING_CACHED, FeatureStore
from difftrain.data.index.build import build_index
from difftrain.data.index.index import Index, IndexColumns, check_columns, newest
from difftrain.data.index.writer import disk_faults
from difftrain.data.plan.buckets import BucketTable
from difftrain.data.plan.every import EveryPlan
from difftrain.data.plan.plan import EVERY, EpochPlan
from difftrain.data.plan.sequential import with_plain_shards
from difftrain.data.plan.table_build import HeldOutSplit, PlanSource, build_tables, held_out, overlaps
from difftrain.data.plan.tables import VERSION, Layout, PlanTables, total_uses
from difftrain.data.plan.whole import WholePlan
from difftrain.data.recipe import Recipe, recipes_of
from difftrain.data.sources.configured import class_argument

Log = Callable[[str], None]
NO_BUCKET = "no bucket"


@dataclass(frozen=True)
class Data:
    """A prepared data set. Picklable."""

    index: Index
    tables: PlanTables
    recipes: tuple[Recipe, ...]  # of each source
    store: FeatureStore = NOTHING_CACHED  # what is cached of it

    @property
    def reasons(self) -> dict[str, int]:
        """Return how many items are not trained on, by kind of reason."""
        unplaced = {NO_BUCKET: self.tables.unplaced} if self.tables.unplaced else {}
        return self.index.summary.reasons | unplaced

    def rejects(self) -> Iterator[Reject]:
        """Iterate over what is not trained on and why: what the index refused, and what fits no bucket."""
        yield from self.index.rejects()
        ids, _ = self.tables.take(np.arange(self.tables.count - self.tables.unplaced, self.tables.count))
        for record in map(self.index.record, ids):
            height, width = record.size_hw
            steps = self.recipes[record.media.source].buckets.steps
            why = f"{width} x {height} px, without enlarging no side may be below {steps}"
            yield Reject(self.index.path(record), f"{NO_BUCKET}: {why}")

    def summary(self) -> dict[str, Any]:
        """Return what reports say of the data set, as JSON."""
        return {
            "name": ", ".join(sorted({source.label for source in self.index.sources})),
            "count": self.index.count,
            "fingerprint": self.index.fingerprint,
            "rejected": self.index.summary.rejected + self.tables.unplaced,
            "rejected_by_reason": self.reasons,
            "duplicates": self.index.duplicates,
            "draws_per_epoch": total_uses(self.tables.training),
            "reg_draws_per_epoch": self.tables.reg_uses,
            "held_out": sum(rows.records for rows in self.tables.validation),
            "buckets": {self.tables.name(rows): rows.uses for rows in self.tables.training},
        }


def prepare(cfg: TrainConfig, *, log: Log = print) -> Path:
    """Bring index and planning tables up to date; return the folder that `open_data` takes. One process a machine.

    Raises: ConfigFault; DataFault where nothing remains to train on, or too much is rejected; TrainingFault where the
    cache folder can't be written.
    """
    index = trusted_index(cfg) if cfg.cache.trust else built_index(cfg, log)
    started = time.perf_counter()
    built = make_tables(cfg, index)
    took = time.perf_counter() - started
    for line in data_lines(
        cfg, Data(index, PlanTables(tables_folder(cfg, index), index.folder), recipes_of(cfg, index.sources))
    ):
        log(line)
    if built and took > 1:
        log(f"planning tables made in {took:.1f} s, kept in {index.folder}")
    return index.folder


def built_index(cfg: TrainConfig, log: Log) -> Index:
    """Bring the index up to date with its sources."""
    folder, cache_dir = index_folder(cfg), cfg.data.cache_dir
    if cache_dir and not is_url(cache_dir) and cache_folder(cfg) != Path(expanded(cache_dir)):
        log(f"data: {cache_dir} cannot be written to, so the index goes to {folder}")
    return Index(Path(build_index(cfg.data, cfg.captions, folder, log=log).folder), classes_of(cfg))


def classes_of(cfg: TrainConfig) -> frozenset[tuple[str, str]]:
    """Return the data set classes that the configuration names: (dotted name, what it is made with)."""
    return frozenset(
        (subset.dataset_class, class_argument(subset)) for subset in subsets_of(cfg) if subset.dataset_class
    )


def trusted_index(cfg: TrainConfig) -> Index:
    """Open the index as it is, without a look at its sources. Raises ConfigFault where there is none, or none to trust."""
    folders = dict.fromkeys(root / "index" / _reading_hash(cfg) for root in _roots(cfg))
    latest = next(filter(None, map(newest, folders)), None)
    if latest is None:
        what = f"there is no complete index of this data below {' or '.join(map(str, folders))}"
        remedy = "leave it out of the first run: the data is indexed once, and the index is kept"
        raise ConfigFault([Fault(option("cache.trust", True), what, remedy)])
    index = Index(latest, classes_of(cfg))
    if strangers := index.foreign_classes():
        what = f"the index {latest} names {', '.join(strangers)}, which the configuration does not: no code is taken from it"
        raise ConfigFault([Fault(option("cache.trust", True), what, "remove that folder; leave the flag out once")])
    check_columns(index.summary)
    return index


def open_data(cfg: TrainConfig, folder: Path) -> Data:
    """Open what `prepare` has made, in constant time."""
    index = Index(Path(folder), classes_of(cfg))
    return Data(index, PlanTables(tables_folder(cfg, index), index.folder), recipes_of(cfg, index.sources))


def global_batches(cfg: TrainConfig, dp_size: int) -> tuple[int, ...]:
    """Return the draws of a full step over all ranks, of each data set."""
    return tuple(size * cfg.training.accumulation * dp_size for size in cfg.batch_sizes)


def make_plan(data: Data, cfg: TrainConfig, global_batch: int | Sequence[int]) -> EpochPlan:
    """Make the plan that a configuration asks for. The seed must be resolved."""
    assert cfg.training.seed is not None
    if cfg.data.epoch_batches == EVERY:
        batches = (global_batch,) if isinstance(global_batch, int) else tuple(global_batch)
        units = {batch // size for batch, size in zip(batches, cfg.batch_sizes, strict=True)}
        if len(units) > 1:
            raise ValueError(f"global batches {batches} of micro batches {cfg.batch_sizes}")
        return EveryPlan(data.tables, cfg.training.seed, cfg.batch_sizes, units.pop())
    return WholePlan(
        data.tables,
        cfg.training.seed,
        global_batch,
        cfg.data.tar_order,
        streams=cfg.data.tar_streams,
        window=cfg.data.tar_window,
    )


def index_folder(cfg: TrainConfig) -> Path:
    """Return where the index of these sources lives: one folder for every combination of folders and reading settings."""
    return cache_folder(cfg) / "index" / _reading_hash(cfg)


def cache_folder(cfg: TrainConfig) -> Path:
    """Return the folder that indexes lie below: --cache_dir where it can be written to, else the user's cache."""
    root = _roots(cfg)[0]
    existing = next((folder for folder in (root / "index", root) if folder.exists()), None)
    return root if existing is None or os.access(existing, os.W_OK) else user_cache()


def _roots(cfg: TrainConfig) -> list[Path]:
    """Return the folders below which an index may lie; what lies on an object store is read only."""
    cache_dir = cfg.data.cache_dir
    return [Path(expanded(cache_dir)), user_cache()] if cache_dir and not is_url(cache_dir) else [user_cache()]


def _reading_hash(cfg: TrainConfig) -> str:
    """Hash the sources and how they are read."""
    reading = {
        "dirs": [os.path.realpath(expanded(folder)) for folder in cfg.data.dirs],
        "repeats": cfg.data.repeats,
        "columns": [cfg.data.image_column, cfg.data.caption_column],
        # what has no caption is found again in an index that was made without or with it, but for whole texts
        "captions": [cfg.captions.extension, cfg.captions.allow_empty and cfg.captions.dialect != "kohya"],
    }
    if cfg.captions.enable_wildcard:
        reading["lines"] = "all"
    if cfg.data.conditioning_dir:
        reading["masks"] = os.path.realpath(expanded(cfg.data.conditioning_dir))
    if cfg.data.num_control:
        folders = [os.path.realpath(expanded(folder)) for folder in cfg.data.control_dirs]
        reading["control"] = [cfg.data.num_control, folders, cfg.data.control_columns]
    clips = [
        [dataset.frame_buckets, dataset.framerate or cfg.data.framerate, dataset.video_clip_mode]
        if reads_clips(dataset.frame_buckets)
        else None
        for dataset in datasets_of(cfg.data, cfg.captions)
    ]
    if any(clips):
        reading["clips"] = clips
    if cfg.data.datasets or cfg.data.reg_dirs or cfg.data.in_json or cfg.data.dataset_class:
        reading["subsets"] = [_reading(subset) for subset in subsets_of(cfg)]
    return _short_hash(reading)


def _reading(subset: SubsetSection) -> list[Any]:
    """Return what decides the items of a subset."""
    paths = [subset.image_dir, subset.metadata_file, subset.conditioning_dir]
    captions = [subset.captions.extension, subset.captions.separator, subset.captions.enable_wildcard]
    later = [subset.captions_file, subset.default_mask, subset.masks_optional, subset.captions.dialect]
    more: list[Any] = later if later != [None, None, False, "kohya"] else []
    if subset.captions.allow_empty and subset.captions.dialect != "kohya":
        more.append("empty captions")
    if subset.control_dirs:
        more.append([os.path.realpath(expanded(folder)) for folder in subset.control_dirs])
    real = [path and os.path.realpath(expanded(str(path))) for path in paths]
    return [
        *real,
        subset.dataset_class,
        subset.is_reg,
        subset.class_tokens,
        subset.repeats,
        subset.flat,
        captions,
        *more,
    ]


def make_tables(cfg: TrainConfig, index: Index) -> bool:
    """Build the planning tables of an index where they are missing; return whether they were."""
    folder = tables_folder(cfg, index)
    if (folder / "header.json").is_file():
        return False
    buckets, ordinals = _record_buckets(cfg, index)
    parted = any(info.frame_buckets for info in index.sources)  # clips of one video are held out together
    several = cfg.data.datasets or cfg.data.reg_dirs or overlaps(index.sources)
    seed, by_key = validation_seed(cfg), not (several or parted)
    with disk_faults(index.folder):
        build_tables(
            folder,
            _columns(cfg, index),
            buckets,
            ordinals,
            [PlanSource(info.repeats, info.dataset, info.is_reg, info.share) for info in index.sources],
            split=HeldOutSplit(cfg.validation.split, seed),
            layout=_layout(cfg),
            fingerprint=folder.name,
            held_out=None if by_key else held_out(index, _shares(cfg, index), seed),
            most=(cfg.data.max_samples, cfg.training.seed or 0) if cfg.data.max_samples else None,
            images_apart=cfg.training.image_batch_size is not None,
        )
    return True


def _columns(cfg: TrainConfig, index: Index) -> IndexColumns:
    in_shards = cfg.data.shard_size and _layout(cfg) == "shard"
    return with_plain_shards(index, cfg.data.shard_size or 1) if in_shards else index.columns()


def _record_buckets(cfg: TrainConfig, index: Index) -> tuple[list[Bucket], np.ndarray]:
    """Choose the bucket of every record: the buckets, and each record's ordinal among them, -1 where none fits."""
    columns, tables = index.columns(), [BucketTable.of(dataset) for dataset in datasets_of(cfg.data, cfg.captions)]
    width, height = np.asarray(columns.width), np.asarray(columns.height)
    if len(tables) == 1:
        return _with_frames(*tables[0].select_many(width, height), columns)
    dataset = np.array([source.dataset for source in index.sources])[np.asarray(columns.source)]
    buckets: list[Bucket] = []
    ordinals = np.full(len(dataset), -1, dtype=np.int64)
    for number, table in enumerate(tables):
        own = np.flatnonzero(dataset == number)
        own_buckets, own_ordinals = table.select_many(width[own], height[own])
        ordinals[own] = np.where(own_ordinals < 0, -1, own_ordinals + len(buckets))
        buckets += own_buckets
    return _with_frames(buckets, ordinals, columns)


def _with_frames(buckets: list[Bucket], ordinals: np.ndarray, columns: IndexColumns) -> tuple[list[Bucket], np.ndarray]:
    """Give the buckets of clips their frames: those of one size and number are a bucket of their own."""
    if columns.clips is None:
        return buckets, ordinals
    numbers, which = np.unique(np.asarray(columns.frames), return_inverse=True)
    of_clips = [bucket._replace(frames=int(frames)) for frames in numbers for bucket in buckets]
    return of_clips, np.where(ordinals < 0, -1, ordinals + which * len(buckets))


def _shares(cfg: TrainConfig, index: Index) -> list[float]:
    """Return the share of each source that is held out for validation."""
    if not cfg.data.datasets:
        return [cfg.validation.split] * len(index.sources)
    return [cfg.data.datasets[source.dataset].validation_split for source in index.sources]


def tables_folder(cfg: TrainConfig, index: Index) -> Path:
    """Return where the tables of an index lie: inside it, named by all else that decides them."""
    data = cfg.data

    # in every name
    sized: list[Any] = [data.resolution, data.enable_bucket]
    if data.enable_bucket:
        sized += [data.min_bucket_reso, data.max_bucket_reso, data.bucket_reso_steps, data.bucket_no_upscale]
    held_out_by = [cfg.validation.split, validation_seed(cfg)] if cfg.validation.split else []
    parts = [VERSION, index.fingerprint, [source.repeats for source in index.sources], sized, held_out_by, _layout(cfg)]

    # only where they are set, so that the names of older tables stand
    for dataset in data.datasets:
        sizes = [getattr(dataset, field) for field in SizeSection.model_fields]
        parts.append([*sizes, dataset.validation_split, len(dataset.subsets)])
    if any(source.share < 1 for source in index.sources):
        parts.append(["share", *(source.share for source in index.sources)])
    if data.max_samples:
        parts.append(["max_samples", data.max_samples, cfg.training.seed or 0])
    if data.sizes:
        parts.append(["sizes", data.sizes])
    if cfg.training.image_batch_size is not None:
        parts.append("images apart")
    if data.shard_size and _layout(cfg) == "shard":
        parts.append(["plain files of a shard", data.shard_size])
    if any(source.is_reg for source in index.sources):
        parts.append([source.is_reg for source in index.sources])
    if held_out_by and (overlaps(index.sources) or any(source.frame_buckets for source in index.sources)):
        parts.append("one lot per image")
    return index.folder / f"tables-{_short_hash(parts)}"


def validation_seed(cfg: TrainConfig) -> int:
    """Return the seed of the split and of validation's draws: its own, else that of training."""
    return next((seed for seed in (cfg.validation.seed, cfg.training.seed) if seed is not None), 0)


def _layout(cfg: TrainConfig) -> Layout:
    return "shard" if cfg.data.tar_order == "sequential" else "key"


def _short_hash(parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def data_lines(cfg: TrainConfig, data: Data) -> list[str]:
    """Say what there is to train on: records, repeats, buckets, what is held out.

    Raises: DataFault where that is nothing, or too little.
    """
    refuse(cfg, data)
    training, validation = data.tables.training, data.tables.validation
    records, uses = sum(rows.records for rows in training), total_uses(training)
    lines = [
        f"data: {note}" for note in dict.fromkeys(note for recipe in data.recipes for note in recipe.buckets.notes)
    ]

    # what is left out, and why
    if data.tables.unplaced:
        lines.append(f"data: rejected, {NO_BUCKET}: {data.tables.unplaced:,}")
    if data.tables.surplus:
        lines.append(
            f"data: {data.tables.surplus:,} regularisation images are not used: the others already give as many "
            "samples an epoch as to train on"
        )
    if data.tables.left_out:
        why = option("data.max_samples") if cfg.data.max_samples else "subsample_ratio"
        lines.append(f"data: {data.tables.left_out:,} records are left out: {why}")

    # what there is
    lines.append(f"data: {records:,} records to train on, {uses:,} samples an epoch with repeats")
    if validation:
        lines.append(f"data: {sum(rows.records for rows in validation):,} records held out for validation")

    if cfg.data.tar_order == "sequential":
        size = cfg.data.shard_size
        plain = f"{size:,} plain files form one shard" if size else "a folder of plain files is one shard"
        lines.append(
            f"data: shards are read in sequence: {data.tables.shards} in all, windows of {cfg.data.tar_window}, up to "
            f"{cfg.data.tar_streams} streams; {plain}"
        )
    return lines + _bucket_lines(data.tables)


def refuse(cfg: TrainConfig, data: Data) -> None:
    """Turn data away that nothing can be made of. Raises DataFault."""
    tables, share = data.tables, cfg.validation.split

    # too much fits no bucket
    rejected = data.index.summary.rejected + tables.unplaced
    limit, items = cfg.data.max_rejected_share, data.index.summary.rejected + tables.count
    if tables.unplaced and (tables.unplaced == tables.count or rejected > limit * items):
        example = next(reject for reject in data.rejects() if reject.reason.startswith(NO_BUCKET))
        raise DataFault(
            f"{rejected:,} of {items:,} items are rejected ({option('data.max_rejected_share')}={limit:g}), {tables.unplaced:,} of them "
            f"because they fit no bucket, such as {example.path} ({example.reason}): "
            f"choose smaller {option('data.bucket_reso_steps')}, or leave out {option('data.bucket_no_upscale', True)}"
        )

    # nothing to train on, or nothing held out
    placed = tables.count - tables.unplaced
    if not tables.training and tables.left_out and not tables.validation:
        shares = ", ".join(f"{share:g}" for share in sorted({source.share for source in data.index.sources}))
        raise DataFault(
            f"{cfg.data.dataset_config or 'the data set'}: subsample_ratio = {shares} leaves out all {placed} records: "
            "nothing remains to train on; give a larger one"
        )
    if not tables.training:
        raise DataFault(
            f"{option('validation.split')}={share} holds out all {placed} records: nothing remains to train on"
        )
    if share and not tables.validation:
        raise DataFault(
            f"{option('validation.split')}={share} holds out none of {placed} records with seed {validation_seed(cfg)}: records "
            f"are chosen by a hash of their names, whatever other data there is; give a larger share or another {option('validation.seed')}"
        )


def _bucket_lines(tables: PlanTables, most: int = 40) -> list[str]:
    """Give the draws of every bucket, and of the small ones together where there are very many."""
    ordered = sorted(tables.training, key=lambda rows: (-rows.uses, rows.bucket))
    lines = [f"bucket {tables.name(rows)}: {rows.uses:,}" for rows in ordered[:most]]
    if len(ordered) > most:
        lines.append(f"and {len(ordered) - most} smaller buckets: {total_uses(ordered[most:]):,}")
    return lines
