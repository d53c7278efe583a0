"""What is to be encoded: the pictures of every bucket, and every caption that training can draw. In loader workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from difftrain.contracts import Batch, Bucket, Draw, Encoder, Record, Tokenize
from difftrain.data.cache.layout import Layout, Part
from difftrain.data.cache.places import UNREADABLE, Rejected
from difftrain.data.cache.store import Captions, Pictures, Shelf, hash_of
from difftrain.data.decoders import HOST
from difftrain.data.media import MEDIA_VERSION, Unusable

if TYPE_CHECKING:
    from difftrain.data.index import Columns
    from difftrain.data.recipe import Recipe
    from difftrain.data.samples import SampleMaker
    from difftrain.data.tables import Tables

CAPTIONS_A_BATCH = 32
_RECORDS_A_LOOK = 1024


@dataclass(frozen=True)
class Piece:
    """Some neighbouring entries of a part, decoded. rows: of the part, those that batch holds; it is None for none."""

    part: Part
    rows: tuple[int, ...]
    batch: Batch | None
    rejected: Rejected


class Work(Protocol):
    """All entries of one encoder: how they lie, how they are named, decoded and found again."""

    layout: Layout
    batch_size: int

    def names(self, fingerprint: str) -> list[str]: ...
    def piece(self, part: Part, start: int, stop: int) -> Piece: ...


class Pieces(Dataset[Any]):
    """Item n is the n-th piece of some parts; a part is always cut into the same pieces."""

    def __init__(self, work: Work, parts: Sequence[Part]) -> None:
        self._work, self._parts = work, parts
        self._ends = np.cumsum([-(-part.count // work.batch_size) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, n: int) -> Piece:
        which = int(np.searchsorted(self._ends, n, side="right"))
        part, size = self._parts[which], self._work.batch_size
        start = (n - int(self._ends[which - 1] if which else 0)) * size
        return self._work.piece(part, start, min(start + size, part.count))


class PictureWork:
    """Every picture of the tables, held out or not, shard by shard and there by key: a split changes nothing here.

    Of a picture that may be flipped the mirrored one is encoded too.
    """

    def __init__(self, maker: SampleMaker, tables: Tables, encoder: Encoder, batch_size: int, *, flip: bool) -> None:
        """Lay out. maker: makes plain samples, without augmentation."""
        self._maker, self.batch_size, self.variants = maker, batch_size, 1 + flip
        found: dict[Bucket, list[np.ndarray]] = {}
        for rows in (*tables.training, *tables.validation):
            ids, _ = tables.take(np.arange(rows.first, rows.first + rows.records))
            found.setdefault(rows.bucket, []).append(np.array(ids, dtype=np.uint32))
        columns = maker.index.columns()
        runs = {bucket: _by_shard(np.unique(np.concatenate(found[bucket])), columns) for bucket in sorted(found)}
        self._ids = np.concatenate(list(runs.values()))
        self.layout = Layout(encoder.features, ((bucket, len(ids)) for bucket, ids in runs.items()), self.variants)

    @property
    def forks(self) -> bool:
        """Tell whether workers that decode may be forked."""
        return self._maker.forks

    def names(self, fingerprint: str) -> list[str]:
        """Name each part by all that decides it: encoder, bucket, and of every picture its bytes and how it is cut."""
        stamps, keys = self._maker.index.stamps(), self._maker.index.columns().keys
        sources = np.asarray(self._maker.index.columns().source)
        recipes = [_settings_of(recipe) for recipe in self._maker.recipes]
        named = []
        for part in self.layout.parts:
            ids = self._ids[part.first : part.first + part.count]
            state = _started(fingerprint, MEDIA_VERSION, part.bucket, self.variants)
            state.update(np.concatenate([keys[ids], stamps[ids]], axis=1).tobytes())
            state.update(b"".join(recipes[source] for source in sources[ids].tolist()))
            named.append(state.hexdigest())
        return named

    def piece(self, part: Part, start: int, stop: int) -> Piece:
        """Decode some pictures; what cannot be is left out with its reason."""
        rows, pixels, rejected = [], [], {}
        ids = self._ids[part.first + start : part.first + stop].tolist()
        for row, record in enumerate(self._maker.index.records(ids), start=start):
            try:
                sample = self._maker.sample(record, Draw(record.id, record.key, 0), 0)
                assert sample.pixels is not None
                pixels.append(sample.pixels)
                rows.append(row)
            except Unusable as error:
                rejected[row] = str(error)
            except OSError as error:
                rejected[row] = f"{UNREADABLE}: {error}"
        features = {"pixels": torch.from_numpy(np.stack(pixels))} if pixels else {}
        return Piece(part, tuple(rows), _batch(part.bucket, features), rejected)

    def found(self, shelf: Shelf, rejected: Mapping[int, str]) -> Pictures:
        """Return what reads the features by record."""
        slots = np.full(self._maker.index.count, -1, dtype=np.int64)
        slots[self._ids] = np.arange(len(self._ids))
        return Pictures(shelf, slots, {int(self._ids[slot]): reason for slot, reason in rejected.items()})


class CaptionWork:
    """Every caption that a record of the tables can be drawn with, once, in the order of its hash.

    Nothing is shuffled, dropped or weighed where captions are cached, so that a caption is a function of what is written.
    """

    variants = 1
    forks = True

    def __init__(self, maker: SampleMaker, tables: Tables, encoder: Encoder, tokenize: Tokenize) -> None:
        """Lay out. maker: makes plain samples, without augmentation."""
        self._maker, self._tokenize, self.batch_size = maker, tokenize, CAPTIONS_A_BATCH
        where: dict[tuple[int, int], tuple[int, int]] = {}
        for rows in (*tables.training, *tables.validation):
            for first in range(rows.first, rows.first + rows.records, _RECORDS_A_LOOK):
                ids, _ = tables.take(np.arange(first, min(first + _RECORDS_A_LOOK, rows.first + rows.records)))
                for record in maker.index.records(ids):
                    for number, caption in enumerate(captions_of(maker, record)):
                        where.setdefault(hash_of(caption), (record.id, number))
        order = sorted(where)
        self._high, self._low = (np.array([pair[i] for pair in order], dtype=np.uint64) for i in (0, 1))
        self._where = np.array([where[pair] for pair in order], dtype=np.uint32)
        self.layout = Layout(encoder.features, [(Bucket(0, 0), len(order))])

    def names(self, fingerprint: str) -> list[str]:
        """Name each part by encoder and captions."""
        named = []
        for part in self.layout.parts:
            entries = slice(part.first, part.first + part.count)
            state = _started(fingerprint)
            state.update(np.stack([self._high[entries], self._low[entries]]).astype("<u8").tobytes())
            named.append(state.hexdigest())
        return named

    def piece(self, part: Part, start: int, stop: int) -> Piece:
        """Read and tokenise some captions."""
        captions = []
        for record_id, number in self._where[part.first + start : part.first + stop].tolist():
            captions.append(captions_of(self._maker, self._maker.index.record(record_id))[number])
        batch = _batch(part.bucket, self._tokenize(captions))
        return Piece(part, tuple(range(start, stop)), batch, {})

    def found(self, shelf: Shelf) -> Captions:
        """Return what reads the features by caption."""
        return Captions(shelf, self._high, self._low)


def captions_of(maker: SampleMaker, record: Record) -> list[str]:
    """Return the caption that is made of each one that is written for a record."""
    draw = Draw(record.id, record.key, 0)
    return [maker.caption(replace(record, captions=(each,)), draw, 0) for each in record.captions]


def _batch(bucket: Bucket, features: dict[str, torch.Tensor]) -> Batch | None:
    if not features:
        return None
    numbers = torch.arange(len(next(iter(features.values()))))
    return Batch(bucket, numbers, torch.zeros_like(numbers), features, {})


def _by_shard(ids: np.ndarray, columns: Columns) -> np.ndarray:
    """Put ids in the order in which tars and parquet files are best read; plain files stay in the order of their keys."""
    ordered: np.ndarray = ids[np.lexsort((ids, np.asarray(columns.shard)[ids], np.asarray(columns.source)[ids]))]
    return ordered


def _settings_of(recipe: Recipe) -> bytes:
    """Hash how a recipe makes pixels of a picture: where it is cut, by which filter, and whether it keeps its alpha."""
    table = recipe.buckets
    parts = [table.sizes, table.max_area, table.steps, table.no_upscale, recipe.interpolation, recipe.alpha_mask]
    if recipe.decoder != HOST:
        parts.append(recipe.decoder)
    return _started(parts).digest()


def _started(*parts: Any) -> hashlib.blake2b:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16)
