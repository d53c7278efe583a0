"""Build the planning tables of an index: bucket by bucket, training before what is held out, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from difftrain.contracts import Bucket, DataFault
from difftrain.data.index.inspection import record_key
from difftrain.data.plan.tables import SEGMENT, VERSION, Layout
from difftrain.diffusion.draws import words_of
from difftrain.io.files import fsync_file

if TYPE_CHECKING:
    from difftrain.data.index.index import Index
    from difftrain.data.sources import SourceInfo


_CHUNK = 1 << 20  # records handled at once where a temporary copy would otherwise be as large as the index


class KeyColumns(Protocol):
    """What the tables need of an index, one entry a record."""

    @property
    def keys(self) -> np.ndarray: ...  # (N, 16) uint8, ascending byte by byte
    @property
    def source(self) -> np.ndarray: ...
    @property
    def shard(self) -> np.ndarray: ...  # counted within the source, in name order


@dataclass(frozen=True)
class HeldOutSplit:
    """Which records are held out for validation: those whose keyed hash falls below the share."""

    share: float = 0.0
    seed: int = 0

    def held_out(self, keys: np.ndarray, purpose: str = "validation") -> np.ndarray:
        """Return a mask over keys (N, 16) uint8. A record's fate never depends on which others there are."""
        mask = np.zeros(len(keys), dtype=bool)
        if not self.share:
            return mask
        limit = np.uint64(int(self.share * 2.0**64))
        for start in range(0, len(keys), _CHUNK):
            part = keys[start : start + _CHUNK]
            mask[start : start + len(part)] = _hashes(part, purpose, self.seed) < limit
        return mask


def _hashes(keys: np.ndarray, purpose: str, seed: int) -> np.ndarray:
    """Hash keys (N, 16) uint8 to uint64."""
    a, b = (np.uint64(word) for word in words_of(purpose, seed, count=2))
    words = np.ascontiguousarray(keys).view("<u8").astype(np.uint64)
    return _mix(_mix(words[:, 0] ^ a) ^ words[:, 1] ^ b)


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64 (Stafford's mix 13); array arithmetic wraps."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


TRAINING, VALIDATION, SURPLUS, LEFT_OUT, UNPLACED = range(5)  # parts of the rows, in this order


MOST_OF = 10_000  # epochs after which a fraction of repeats comes out even, at most


class PlanSource(NamedTuple):
    """What planning needs of a source: how often an epoch uses its records, which of them, and for what."""

    repeats: int | float = 1
    dataset: int = 0
    is_reg: bool = False  # regularisation pictures: used as often as there are training draws in their data set
    share: float = 1.0  # of its records that are used at all, by the hash of their keys: always the same

    @property
    def fraction(self) -> Fraction:
        """Return the repeats exactly: 0.1 is a tenth, 0.333333 a third. Regularisation pictures have whole ones."""
        repeats = Fraction(str(self.repeats)).limit_denominator(MOST_OF)
        return Fraction(max(1, round(repeats))) if self.is_reg else repeats


class DatasetBucket(NamedTuple):
    """A bucket of one data set; sorted, those of a data set follow one another by size."""

    dataset: int
    bucket: Bucket


class TableSegment(NamedTuple):
    """A row of SEGMENT."""

    shard: int
    first: int
    records: int
    repeats: int
    extra: int = 0
    of: int = 1


@dataclass(frozen=True)
class _Arrangement:
    """One entry a record (by id), and the order of the rows."""

    part: np.ndarray
    bucket: np.ndarray  # its rank among those of all data sets
    shard: np.ndarray  # counted through all sources
    repeats: np.ndarray  # whole ones
    fraction: np.ndarray  # ordinal in `fractions` of what comes to them
    order: np.ndarray  # row -> id
    fractions: Sequence[Fraction] = (Fraction(0),)


def build_tables(
    folder: Path,
    columns: KeyColumns,
    buckets: Sequence[Bucket],
    ordinals: np.ndarray,
    sources: Sequence[float] | Sequence[PlanSource],
    *,
    split: HeldOutSplit,
    layout: Layout,
    fingerprint: str,
    held_out: np.ndarray | None = None,
    most: tuple[int, int] | None = None,
    images_apart: bool = False,
) -> None:
    """Write the tables of an index into `folder`, under a temporary name that is renamed at the end.

    buckets, ordinals (N,): the bucket of each record, -1 where none fits. sources: of each, by its ordinal; a number
    stands for so many repeats. held_out: what is, where the records' keys alone do not decide it. most: (number, seed):
    so many records are trained on, chosen by the seed. images_apart: images have batch sizes of their own, after those of
    all data sets.
    """
    count = len(columns.keys)
    if not 0 < count < 1 << 32:
        raise DataFault(f"tables need 1 to 4,294,967,295 records, the index has {count}")
    temporary = folder.with_name(f"tmp-{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        # order the records: by part, bucket, and repeats or shard
        plan_sources = [source if isinstance(source, PlanSource) else PlanSource(source) for source in sources]
        shard, firsts = _through_all_sources(columns, len(plan_sources))
        mask = split.held_out(columns.keys) if held_out is None else held_out
        dataset_buckets, rank = _dataset_buckets(columns, buckets, ordinals, plan_sources)
        arranged = _arrange(columns, rank, shard, plan_sources, mask, layout, most)

        # write
        header = {"version": VERSION, "fingerprint": fingerprint, "layout": layout, "records": count, "shards": firsts}
        of_reg = (arranged.part == TRAINING) & np.array([source.is_reg for source in plan_sources])[columns.source]
        if images_apart:
            header["images_after"] = 1 + max(source.dataset for source in plan_sources)
        header["reg_uses"] = int(arranged.repeats[of_reg].sum())
        _write(temporary, columns.keys, dataset_buckets, arranged, layout, header)

        # whole or not at all
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "header.json").is_file():  # else another process was faster; its copy is the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _dataset_buckets(
    columns: KeyColumns, buckets: Sequence[Bucket], ordinals: np.ndarray, sources: Sequence[PlanSource]
) -> tuple[list[DatasetBucket], np.ndarray]:
    """Return the buckets of the data sets, sorted, and the rank of each record's among them, -1 where none fits.

    Each is known by data set and size, never by its position in a list.
    """
    datasets = 1 + max(source.dataset for source in sources)
    dataset_buckets = sorted({DatasetBucket(dataset, bucket) for dataset in range(datasets) for bucket in buckets})
    # the last column answers for the ordinal -1: no bucket fits
    rank_of = {pair: rank for rank, pair in enumerate(dataset_buckets)}
    ranks = np.array([[rank_of[DatasetBucket(d, b)] for b in buckets] + [-1] for d in range(datasets)], dtype=np.int64)
    dataset = np.array([source.dataset for source in sources])
    return dataset_buckets, ranks[0 if datasets == 1 else dataset[columns.source], ordinals]


def _arrange(
    columns: KeyColumns,
    rank: np.ndarray,
    shard: np.ndarray,
    sources: Sequence[PlanSource],
    held_out: np.ndarray,
    layout: Layout,
    most: tuple[int, int] | None = None,
) -> _Arrangement:
    """Decide part, repeats and order. rank: of each record's bucket, -1 where none fits."""
    # part
    part = np.where(held_out, VALIDATION, TRAINING)
    for number, source in enumerate(sources):
        if source.share < 1:
            own = np.flatnonzero(np.asarray(columns.source) == number)
            # the records that a subset's share leaves out are drawn like held-out ones, by key
            part[own[~HeldOutSplit(source.share, 0).held_out(columns.keys[own], "subsample")]] = LEFT_OUT
    part[rank < 0] = UNPLACED
    if most is not None:
        _keep(most, columns, sources, part)

    # repeats: whole ones, and the fraction of one more
    exact = [source.fraction for source in sources]
    fractions = sorted({repeats % 1 for repeats in exact} | {Fraction(0)})
    repeats_of = np.array([repeats // 1 for repeats in exact], dtype=np.int64)
    fraction_of = np.array([fractions.index(repeats % 1) for repeats in exact], dtype=np.int64)
    trained = part == TRAINING
    times = np.where(trained, repeats_of[columns.source], 1)  # held-out records serve once
    fraction = np.where(trained, fraction_of[columns.source], 0)
    for dataset in sorted({source.dataset for source in sources if source.is_reg}):
        _balance(dataset, columns, sources, part, times)

    # order: the last group counts most
    rank = np.where(part == UNPLACED, 0, rank)
    group = np.where(part == TRAINING, times if layout == "key" else shard, 0)
    rows = _sorted_by(*((fraction,) if len(fractions) > 1 else ()), group, rank, part)
    return _Arrangement(part, rank, shard, times, fraction, rows, fractions)


def _keep(most: tuple[int, int], columns: KeyColumns, sources: Sequence[PlanSource], part: np.ndarray) -> None:
    """Leave out all training records but so many, those of the least hashes: changes part."""
    number, seed = most
    regs = np.array([source.is_reg for source in sources])
    own = np.flatnonzero((part == TRAINING) & ~regs[columns.source])
    order = np.argsort(_hashes(np.asarray(columns.keys)[own], "max_samples", seed), kind="stable")
    part[own[order[number:]]] = LEFT_OUT


def _balance(
    dataset: int, columns: KeyColumns, sources: Sequence[PlanSource], part: np.ndarray, times: np.ndarray
) -> None:
    """Use the regularisation pictures of a data set as often as it has training draws: changes part and times."""
    ours = np.array([source.dataset == dataset for source in sources])
    regs = np.array([source.is_reg for source in sources])
    trained = part == TRAINING
    draws = int(times[trained & (ours & ~regs)[columns.source]].sum())  # of fractions of repeats the whole part
    reg_ids = np.flatnonzero(trained & (ours & regs)[columns.source])  # ids follow the keys
    if not len(reg_ids):
        return
    used = reg_uses(times[reg_ids], draws)
    times[reg_ids] = np.maximum(used, 1)
    part[reg_ids[used == 0]] = SURPLUS


def reg_uses(repeats: np.ndarray, draws: int) -> np.ndarray:
    """Return how often an epoch uses each regularisation picture, in the order of their keys.

    kohya's rule: each in turn as often as its folder says, until they are as many as the training draws; what is left
    then is not used, and where they run out before, each in turn once more.
    """
    before = np.cumsum(repeats) - repeats
    lacking = draws - int(repeats.sum())
    if lacking <= 0:
        return np.where(before < draws, repeats, 0)
    rounds, remaining = divmod(lacking, len(repeats))
    more: np.ndarray = repeats + rounds + (np.arange(len(repeats)) < remaining)
    return more


def _through_all_sources(columns: KeyColumns, sources: int) -> tuple[np.ndarray, list[int]]:
    """Number shards through all sources; return each record's, and each source's first."""
    source, shard = np.asarray(columns.source), np.asarray(columns.shard).astype(np.int64)
    most = np.full(sources, -1, dtype=np.int64)
    np.maximum.at(most, source, shard)
    firsts = np.concatenate([[0], np.cumsum(most + 1)])
    return firsts[source] + shard, firsts.tolist()


def _sorted_by(*groups: np.ndarray) -> np.ndarray:
    """Return ids sorted by the groups (the last counts most), then by key, which is the order of ids."""
    order = np.arange(len(groups[0]))
    for group in groups:
        low, span = group.min(), int(group.max()) - int(group.min())
        if span:
            narrow = (group - low).astype(np.uint16) if span < 1 << 16 else group  # 16 bits: a radix sort
            order = order[np.argsort(narrow[order], kind="stable")]
    return order


def _write(
    folder: Path,
    keys: np.ndarray,
    dataset_buckets: Sequence[DatasetBucket],
    arranged: _Arrangement,
    layout: Layout,
    header: dict[str, Any],
) -> None:
    """Write rows, segments and header, and bring them to the disk."""
    order = arranged.order
    np.save(folder / "ids.npy", order.astype("<u4"))

    # one entry for each run of rows of one bucket and part
    segments: list[TableSegment] = []
    parts: dict[int, list[dict[str, Any]]] = {TRAINING: [], VALIDATION: []}
    for first, stop in _runs((arranged.bucket + len(dataset_buckets) * arranged.part)[order]):
        id_ = order[first]
        if arranged.part[id_] not in parts:
            continue
        own = _segments(arranged, first, stop, layout)
        dataset, bucket = dataset_buckets[arranged.bucket[id_]]
        entry = {
            "dataset": dataset,
            "bucket": list(bucket),
            "first": first,
            "records": stop - first,
            "uses": _mean_uses(own),
            "digest": _digest(keys, order, own),
            "segments": [len(segments), len(segments) + len(own)],
        }
        if "images_after" in header and bucket.frames == 1:
            entry["group"] = dataset + header["images_after"]
        parts[int(arranged.part[id_])].append(entry)
        segments += own

    # of the other parts the numbers alone
    counted = (("surplus", SURPLUS), ("left_out", LEFT_OUT), ("unplaced", UNPLACED))
    left = {name: int((arranged.part == which).sum()) for name, which in counted}
    header |= {"training": parts[TRAINING], "validation": parts[VALIDATION], **left}
    np.save(folder / "segments.npy", np.array(segments, dtype=SEGMENT))
    (folder / "header.json").write_text(json.dumps(header, indent=1))

    for name in ("ids.npy", "segments.npy", "header.json"):
        fsync_file(folder / name)


def _segments(arranged: _Arrangement, first: int, stop: int, layout: Layout) -> list[TableSegment]:
    """Cut the rows of one bucket into runs of one shard and one number of repeats."""
    ids = arranged.order[first:stop]
    shards = arranged.shard[ids] if layout == "shard" else np.zeros(len(ids), dtype=np.int64)
    if arranged.part[ids[0]] == VALIDATION:
        return [TableSegment(0, first, len(ids), 1)]
    times, over = arranged.repeats[ids], arranged.fraction[ids]
    segments = []
    for a, b in _runs(np.column_stack([shards, times, over])):
        fraction = arranged.fractions[int(over[a])]
        segments.append(
            TableSegment(int(shards[a]), first + a, b - a, int(times[a]), fraction.numerator, fraction.denominator)
        )
    return segments


def _mean_uses(segments: Sequence[TableSegment]) -> int | float:
    """Return the uses of an epoch on average."""
    uses = sum((run.records * (run.repeats + Fraction(run.extra, run.of)) for run in segments), Fraction(0))
    return uses.numerator if uses.denominator == 1 else round(float(uses), 6)


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (start, stop) of every run of equal values (or rows of values)."""
    changed = values[1:] != values[:-1]
    edges = (np.flatnonzero(changed if values.ndim == 1 else changed.any(axis=1)) + 1).tolist()
    return list(zip([0, *edges], [*edges, len(values)], strict=True))


def _digest(keys: np.ndarray, order: np.ndarray, segments: Sequence[TableSegment]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for _, first, records, repeats, extra, of in segments:
        state.update(
            b"%d x %d;" % (records, repeats) if not extra else b"%d x %d+%d/%d;" % (records, repeats, extra, of)
        )
        for start in range(first, first + records, _CHUNK):
            state.update(np.ascontiguousarray(keys[order[start : min(start + _CHUNK, first + records)]]).tobytes())
    return state.hexdigest()


def held_out(index: Index, shares: Sequence[float], seed: int) -> np.ndarray:
    """Return a mask over the records. shares: of each source; of those that overlap, the largest counts for all.

    Regularisation pictures are never held out, as in kohya's scripts.
    """
    sources, columns = index.sources, index.columns()

    # the share of each source: overlapping ones have the same outermost folder
    tops = _tops(sources)
    together = {top: [n for n, rival in enumerate(tops) if rival == top] for top in set(tops)}
    common = [max(shares[n] for n in together[top]) for top in tops]
    common = [0.0 if info.is_reg else share for info, share in zip(sources, common, strict=True)]

    # what is hashed: a picture of several sources has one hash in all of them, and the clips of a video have one
    overlapping = [
        info.ordinal for info, top in zip(sources, tops, strict=True) if len(together[top]) > 1 or info.frame_buckets
    ]
    split_hashes = _split_hashes(index, overlapping, tops) if overlapping and any(common) else columns.keys

    mask = np.zeros(len(columns.keys), dtype=bool)
    source = np.asarray(columns.source)
    for share in sorted(set(common) - {0.0}):
        own = np.array([rival == share for rival in common])[source]
        mask[own] = HeldOutSplit(share, seed).held_out(split_hashes[own])
    return mask


def overlaps(sources: Sequence[SourceInfo]) -> bool:
    """Tell whether two sources may show the same picture."""
    return len(set(_tops(sources))) < len(sources)


def _tops(sources: Sequence[SourceInfo]) -> list[PurePath]:
    """Return for each source the outermost folder among those of all sources that it lies in."""
    paths = [PurePath(info.root, info.prefix, info.only if info.kind in ("tar", "parquet") else "") for info in sources]
    known = set(paths)
    return [next(top for top in (*reversed(path.parents), path) if top in known) for path in paths]


def _split_hashes(index: Index, ordinals: Sequence[int], tops: Sequence[PurePath]) -> np.ndarray:
    """Return the keys with those of overlapping sources replaced by what their pictures' paths give."""
    columns = index.columns()
    split_hashes = np.array(columns.keys)
    id_of = np.empty(int(columns.row.max()) + 1, dtype=np.int64)
    id_of[columns.row] = np.arange(len(columns.row))
    for row, source, path, member in index.places(ordinals):
        absolute = os.path.normpath(os.path.join(index.sources[source].root, path))  # noqa: PTH118 - no link is followed
        name = os.path.relpath(absolute, tops[source]) + (f"!{member}" if member else "")
        split_hashes[id_of[row]] = np.frombuffer(record_key("overlapping sources", name), dtype=np.uint8)
    return split_hashes
