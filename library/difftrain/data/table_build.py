"""Build the planning tables of an index: bucket by bucket, training before validation, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from difftrain.contracts import Bucket, DataFault
from difftrain.data.tables import SEGMENT, VERSION, Layout
from difftrain.diffusion.keys import words_of

_CHUNK = 1 << 20  # records handled at once where a temporary copy would otherwise be as large as the index


class Columns(Protocol):
    """What the tables need of an index, one entry a record."""

    @property
    def keys(self) -> np.ndarray: ...  # (N, 16) uint8, ascending byte by byte
    @property
    def source(self) -> np.ndarray: ...
    @property
    def shard(self) -> np.ndarray: ...  # counted within the source, in name order


@dataclass(frozen=True)
class Split:
    """Which records are held out for validation: those whose keyed hash falls below the share."""

    share: float = 0.0
    seed: int = 0

    def held_out(self, keys: np.ndarray) -> np.ndarray:
        """Return a mask over keys (N, 16) uint8. A record's fate never depends on which others there are."""
        mask = np.zeros(len(keys), dtype=bool)
        if not self.share:
            return mask
        a, b = (np.uint64(word) for word in words_of("validation", self.seed, count=2))
        limit = np.uint64(int(self.share * 2.0**64))
        for start in range(0, len(keys), _CHUNK):
            words = np.ascontiguousarray(keys[start : start + _CHUNK]).view("<u8").astype(np.uint64)
            mask[start : start + len(words)] = _mix(_mix(words[:, 0] ^ a) ^ words[:, 1] ^ b) < limit
        return mask


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64 (Stafford's mix 13); array arithmetic wraps."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


TRAINING, VALIDATION, UNPLACED = range(3)  # parts of the rows, in this order


@dataclass(frozen=True)
class _Arrangement:
    """One entry a record (by id), and the order of the rows."""

    part: np.ndarray
    bucket: np.ndarray  # rank of its bucket by size
    shard: np.ndarray  # counted through all sources
    repeats: np.ndarray
    order: np.ndarray  # row -> id


def build_tables(
    folder: Path,
    columns: Columns,
    buckets: Sequence[Bucket],
    ordinals: np.ndarray,
    repeats: Sequence[int],
    *,
    split: Split,
    layout: Layout,
    fingerprint: str,
) -> None:
    """Write the tables of an index into `folder`, under a temporary name that is renamed at the end.

    buckets, ordinals (N,): the bucket of each record, -1 where none fits. repeats: of each source, by its ordinal.
    """
    count = len(columns.keys)
    if not 0 < count < 1 << 32:
        raise DataFault(f"tables need 1 to 4,294,967,295 records, the index has {count}")
    temporary = folder.with_name(f"tmp-{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        sizes = sorted(set(buckets))
        shard, firsts = _through_all_sources(columns, len(repeats))
        arranged = _arrange(columns, sizes, buckets, ordinals, shard, repeats, split, layout)
        header = {"version": VERSION, "fingerprint": fingerprint, "layout": layout, "records": count, "shards": firsts}
        _write(temporary, columns.keys, sizes, arranged, layout, header)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "header.json").is_file():  # else another process was faster; its copy is the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _arrange(
    columns: Columns,
    sizes: Sequence[Bucket],
    buckets: Sequence[Bucket],
    ordinals: np.ndarray,
    shard: np.ndarray,
    repeats: Sequence[int],
    split: Split,
    layout: Layout,
) -> _Arrangement:
    """Decide part, bucket and order. A bucket is known by its size, never by its place in a list."""
    rank_of = {bucket: rank for rank, bucket in enumerate(sizes)}
    rank = np.array([*(rank_of[bucket] for bucket in buckets), 0], dtype=np.int64)
    part = np.where(split.held_out(columns.keys), VALIDATION, TRAINING)
    part[np.asarray(ordinals) < 0] = UNPLACED
    trained = part == TRAINING
    times = np.where(trained, np.asarray(repeats, dtype=np.int64)[columns.source], 1)  # held-out records serve once
    place = np.where(part == UNPLACED, 0, rank[ordinals])
    group = np.where(trained, times if layout == "key" else shard, 0)
    return _Arrangement(part, place, shard, times, _sorted_by(group, place, part))


def _through_all_sources(columns: Columns, sources: int) -> tuple[np.ndarray, list[int]]:
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
    sizes: Sequence[Bucket],
    arranged: _Arrangement,
    layout: Layout,
    header: dict[str, Any],
) -> None:
    order = arranged.order
    np.save(folder / "ids.npy", order.astype("<u4"))
    segments: list[tuple[int, int, int, int]] = []
    parts: dict[int, list[dict[str, Any]]] = {TRAINING: [], VALIDATION: []}
    unplaced = 0
    for first, stop in _runs((arranged.bucket + len(sizes) * arranged.part)[order]):
        id_ = order[first]
        if arranged.part[id_] == UNPLACED:
            unplaced = stop - first
            continue
        own = _segments(arranged, first, stop, layout)
        entry = {
            "bucket": list(sizes[arranged.bucket[id_]]),
            "first": first,
            "records": stop - first,
            "uses": sum(records * repeats for _, _, records, repeats in own),
            "digest": _digest(keys, order, own),
            "segments": [len(segments), len(segments) + len(own)],
        }
        parts[int(arranged.part[id_])].append(entry)
        segments += own
    header |= {"training": parts[TRAINING], "validation": parts[VALIDATION], "unplaced": unplaced}
    np.save(folder / "segments.npy", np.array(segments, dtype=SEGMENT))
    (folder / "header.json").write_text(json.dumps(header, indent=1))
    for name in ("ids.npy", "segments.npy", "header.json"):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def _segments(arranged: _Arrangement, first: int, stop: int, layout: Layout) -> list[tuple[int, int, int, int]]:
    """Cut the rows of one bucket into runs of (shard, first row, records, repeats)."""
    ids = arranged.order[first:stop]
    shards = arranged.shard[ids] if layout == "shard" else np.zeros(len(ids), dtype=np.int64)
    if arranged.part[ids[0]] == VALIDATION:
        return [(0, first, len(ids), 1)]
    times = arranged.repeats[ids]
    changes = np.column_stack([shards, times])
    return [(int(shards[a]), first + a, b - a, int(times[a])) for a, b in _runs(changes)]


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (start, stop) of every run of equal values (or rows of values)."""
    changed = values[1:] != values[:-1]
    edges = (np.flatnonzero(changed if values.ndim == 1 else changed.any(axis=1)) + 1).tolist()
    return list(zip([0, *edges], [*edges, len(values)], strict=True))


def _digest(keys: np.ndarray, order: np.ndarray, segments: Sequence[tuple[int, int, int, int]]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for _, first, records, repeats in segments:
        state.update(b"%d x %d;" % (records, repeats))
        for start in range(first, first + records, _CHUNK):
            state.update(np.ascontiguousarray(keys[order[start : min(start + _CHUNK, first + records)]]).tobytes())
    return state.hexdigest()
