"""An index of made-up records, for tests and benchmarks of what reads indexes at scale: no pictures lie behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from difftrain.data.index.index import Index, IndexSummary
from difftrain.data.index.writer import IndexWriter, RecordRow
from difftrain.data.sources.base import SourceInfo

SIZES = ((512, 512), (640, 480), (480, 640), (1024, 768), (768, 1024), (1920, 1080), (900, 1600), (2048, 512))
_BATCH = 1 << 15


def write_synthetic_index(
    folder: Path | str,
    records: int,
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    repeats: Sequence[int] = (1,),
    shard_records: int = 10_000,
    seed: int = 0,
) -> Index:
    """Write an index of `records` records in tars of `shard_records`, and open it.

    sizes: (width, height) drawn from with equal chances. repeats: of each source; records are dealt to them in runs.
    A million records take some 5 s; equal arguments give equal indexes.
    """
    infos = tuple(
        SourceInfo(ordinal=i, name=str(i), kind="tar", root="/nowhere", repeats=times)
        for i, times in enumerate(repeats)
    )
    writer = IndexWriter(Path(folder))
    try:
        # deal the records to the sources in runs, and cut each run into shards
        per_source = -(-records // len(infos))
        files: list[tuple[int, int, int]] = []  # source, shard, records
        for info in infos:
            own = min(per_source, max(0, records - info.ordinal * per_source))
            starts = range(0, own, shard_records)
            files += [(info.ordinal, shard, min(shard_records, own - start)) for shard, start in enumerate(starts)]

        # write as for a real data set: files, records, then the summary that makes it whole
        writer.add_files(
            (number, source, f"{shard:05d}.tar", 1 << 30, 0, "synthetic", 1, shard, None)
            for number, (source, shard, _) in enumerate(files)
        )
        writer.add_records(_rows(files, sizes, seed))
        shards = tuple(sum(source == info.ordinal for source, _, _ in files) for info in infos)
        summary = IndexSummary("", 0, "", None, 0, {}, infos, shards, "quick", stamp="synthetic")
        return Index(Path(writer.finish(summary).folder))
    except BaseException:
        writer.discard()
        raise


def _rows(files: list[tuple[int, int, int]], sizes: Sequence[tuple[int, int]], seed: int) -> Iterator[RecordRow]:
    for number, (_, _, count) in enumerate(files):
        rng = np.random.Generator(np.random.Philox(key=[seed, number]))
        keys = rng.bytes(16 * count)
        which = rng.integers(0, len(sizes), count).tolist()
        for i, size in enumerate(which):
            captions = f'["a made-up picture, number {i} of shard {number}"]'
            yield (
                number,
                None,
                f"{i:09d}.jpg",
                512 + i * 100_000,
                99_000,
                *sizes[size],
                captions,
                None,
                keys[16 * i : 16 * i + 16],
                None,
                None,
            )
