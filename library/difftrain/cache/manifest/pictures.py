"""Listing pictures, masks and references, each and its mirror image; and pairs, for an encoder that reads a picture with its caption.

The address of a pair is made of two: those that the picture and the caption would have alone, by that encoder. Captions
are listed alone first, as those of a text encoder are, so that what has not changed is not tokenised again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from difftrain.cache.manifest.address import (
    BYTES,
    MASKS,
    V16,
    Cut,
    MediaTransforms,
    as_array,
    joined_address,
    pixel_settings,
)
from difftrain.cache.manifest.captions import held_out
from difftrain.cache.manifest.companions import NO_MASK, mask_contents, reference_contents
from difftrain.cache.manifest.content_hash import Log, picture_contents
from difftrain.cache.manifest.manifest import (
    ROW,
    UNREAD,
    CacheManifest,
    ManifestRequest,
    ManifestWriter,
    reference_rows,
    write_manifest,
)
from difftrain.contracts import CAPTION, Bucket, DataFault, Reject
from difftrain.data.captions import may_drop
from difftrain.data.index.writer import disk_faults

if TYPE_CHECKING:
    from difftrain.data.index.index import Index
    from difftrain.data.plan.tables import PlanTables
    from difftrain.data.prepare import Data


_ROWS = 1 << 18


@dataclass(frozen=True)
class PictureEntries:
    """The pictures of the tables, their masks or references, held out or not, as one encoder reads them: a split changes nothing here.

    ids: of the records, ascending. passed: what cannot be read now. record_addresses: of each picture and its mirror image the
    address of what is made of it alone, zeros for none, UNREAD for what cannot be read now. ordered: ids, bucket by
    bucket and otherwise as files have them. Shapes: ids, ordered (n,); bucket_of, flips (N,) of all records;
    record_addresses (N, 1 or 2, 16) uint8.
    """

    data: Data
    request: ManifestRequest
    ids: np.ndarray
    contents: np.ndarray
    passed: list[Reject]
    buckets: list[Bucket]
    bucket_of: np.ndarray

    @classmethod
    def of(cls, data: Data, request: ManifestRequest, *, look: bool, log: Log) -> PictureEntries:
        """Find out what lies in the files, as far as it is not known."""
        index, masks = data.index, request.name == MASKS
        buckets, bucket_of = bucket_by_record(data.tables, index.count)
        needed = bucket_of >= 0
        if masks:
            needed &= np.array([recipe.has_masks for recipe in data.recipes])[np.asarray(index.columns().source)]
        ids = np.flatnonzero(needed)
        if masks:
            contents, passed = mask_contents(index, data.recipes, ids, look=look, log=log)
            ids = ids[(contents[ids] != NO_MASK).any(axis=1)]
        elif "control" in request.encoder.source:
            numbers = range(request.encoder.reference, request.encoder.reference + request.encoder.references)
            contents, passed = reference_contents(index, ids, numbers, look=look, log=log)
        else:
            contents, passed = picture_contents(index, ids, look=look, log=log)
        return cls(data, request, ids, contents, passed, buckets, bucket_of)

    @property
    def settings(self) -> list[Any]:
        """Return all that decides their manifest, the encoder aside, as JSON values."""
        known = hashlib.blake2b(self.contents[self.ids].tobytes(), digest_size=BYTES).hexdigest()
        shown = [list(astuple(recipe.control_area)) for recipe in self.data.recipes if recipe.control_area]
        shown = shown if "control" in self.request.encoder.source else []
        return [self.data.tables.folder.name, [pixel_settings(recipe) for recipe in self.data.recipes], known, *shown]

    @cached_property
    def flips(self) -> np.ndarray:
        """Tell of each record whether its mirror image is drawn too."""
        flips: np.ndarray = np.array([recipe.flip for recipe in self.data.recipes])
        return flips[np.asarray(self.data.index.columns().source)]

    @cached_property
    def record_addresses(self) -> np.ndarray:
        """Make the addresses."""
        request = self.request
        is_reference = "control" in request.encoder.source
        kind: Cut = "mask" if request.name == MASKS else "reference" if is_reference else "image"
        transforms = MediaTransforms(self.data.recipes, request.fingerprint, request.storage, kind)
        variants = 2 if self.flips[self.ids].any() else 1
        return _addresses(self.data.index, transforms, self.ids, self.contents, self.flips, variants)

    @property
    def ordered(self) -> np.ndarray:
        """Put the records in the order in which they are encoded."""
        columns, ids = self.data.index.columns(), self.ids
        order = (ids, *(np.asarray(column)[ids] for column in (columns.shard, columns.source)), self.bucket_of[ids])
        return ids[np.lexsort(order)]


def write_pictures(to: ManifestWriter, pictures: PictureEntries) -> None:
    ids, record_addresses, keys = pictures.ids, pictures.record_addresses, pictures.data.index.columns().keys
    # a picture and its mirror image are in one batch
    even = to.request.batch_size + to.request.batch_size % record_addresses.shape[1]
    rows = _rows(pictures.ordered, record_addresses)
    references = (
        piece
        for start in range(0, len(ids), _ROWS)
        for piece in reference_rows(keys, _rows(ids[start : start + _ROWS], record_addresses))
    )
    with disk_faults(pictures.data.index.folder):
        aside, bucket_of = to.open_aside(), pictures.bucket_of
        facts = to.facts(even, pictures.passed)
        write_manifest(
            aside, facts, rows, lambda r: bucket_of[r], pictures.buckets, references, len(rows), record_addresses
        )
        to.publish(aside)


def bucket_by_record(tables: PlanTables, count: int) -> tuple[list[Bucket], np.ndarray]:
    """Return the buckets in order, and the place of each record's among them, -1 for none."""
    runs = (*tables.training, *tables.validation)
    buckets = sorted({rows.bucket for rows in runs})
    bucket_of = np.full(count, -1, dtype=np.int32)
    for rows in runs:
        bucket_of[np.array(tables.ids()[rows.first : rows.first + rows.records])] = buckets.index(rows.bucket)
    return buckets, bucket_of


def _addresses(
    index: Index, transforms: MediaTransforms, ids: np.ndarray, contents: np.ndarray, flips: np.ndarray, variants: int
) -> np.ndarray:
    """Make the addresses of pictures, those of one size together, and of clips those of one window. Shape: (N, variants, 16) uint8, by id."""
    columns = index.columns()
    record_addresses = np.zeros((index.count, variants, BYTES), dtype=np.uint8)
    decides = [columns.source, columns.height, columns.width]
    decides += [] if columns.clips is None else list(np.asarray(columns.clips).T)
    sizes = [np.asarray(column)[ids].astype(np.uint64) for column in decides]
    order = np.lexsort(sizes[::-1])
    new = np.flatnonzero(np.any([np.diff(size[order]) != 0 for size in sizes], axis=0)) + 1
    for group in np.split(order, new) if len(order) else ():
        own, first = ids[group], group[0]
        source, height, width, *window = (int(size[first]) for size in sizes)
        clip = index.window(source, *window) if window else None
        bytes_of = contents[own].tobytes()
        for variant in range(1 + bool(flips[own[0]])):
            state, made = transforms.state(source, (height, width), variant == 1, clip), bytearray()
            for start in range(0, len(bytes_of), BYTES):
                digest = state.copy()
                digest.update(bytes_of[start : start + BYTES])
                made += digest.digest()
            record_addresses[own, variant] = np.frombuffer(made, np.uint8).reshape(-1, BYTES)
    record_addresses[ids[~contents[ids].any(axis=1)]] = np.frombuffer(UNREAD, np.uint8)
    return record_addresses


def _rows(ids: np.ndarray, record_addresses: np.ndarray) -> np.ndarray:
    """Return what is wanted of pictures, each and its mirror image. Shape: (M,) ROW."""
    variants = record_addresses.shape[1]
    rows = np.zeros(len(ids) * variants, dtype=ROW)
    rows["record"], rows["variant"] = np.repeat(ids, variants), np.tile(np.arange(variants), len(ids))
    addresses = record_addresses[ids].reshape(-1, BYTES)
    rows["address"] = addresses.view(V16).reshape(-1)
    words = addresses.view(np.uint64)
    return rows[(words[:, 0] != words[:, 1]) | ((words[:, 0] + np.uint64(1)) > 1)]  # neither nothing nor UNREAD


DROPPED = 0  # number of the empty caption; the captions that a record is drawn with follow
_MAX_VARIANT = np.iinfo(ROW["variant"]).max
_RECORDS = 1 << 14


def caption_request(request: ManifestRequest) -> ManifestRequest:
    """Return what lists the captions of pairs."""
    return replace(request, name=f"{request.name}.captions", encoder=replace(request.encoder, source=CAPTION))


def caption_and_flip(variant: int) -> tuple[int, bool]:
    """Return which caption a pair has, DROPPED or counted from 1, and whether its picture is mirrored."""
    return variant >> 1, bool(variant & 1)


def write_pairs(data: Data, to: ManifestWriter, pictures: PictureEntries, captions: CacheManifest) -> None:
    """Write the list of pairs. captions: of the same records, and of others whose pictures cannot be read."""
    pairs = _PairRows(data, pictures, captions)
    with disk_faults(data.index.folder):
        aside = to.open_aside()
        with (aside / "rows.bin").open("wb") as file:
            for piece in pairs.rows(pictures.ordered):
                file.write(piece.tobytes())
        size = (aside / "rows.bin").stat().st_size
        rows = np.memmap(aside / "rows.bin", dtype=ROW, mode="r") if size else np.empty(0, ROW)
        keys, bucket_of = data.index.columns().keys, pictures.bucket_of
        references = (piece for some in pairs.rows(pictures.ids) for piece in reference_rows(keys, some))
        facts = to.facts(to.request.batch_size, pictures.passed)
        write_manifest(
            aside,
            facts,
            rows,
            lambda r: bucket_of[r],
            pictures.buckets,
            references,
            len(rows),
            pictures.record_addresses,
        )
        (aside / "rows.bin").unlink()
        to.publish(aside)


class _PairRows:
    """Which captions each picture is drawn with, and their addresses.

    Every caption of a record, and the empty one where its recipe drops captions, beside the picture as it is and, where
    its recipe flips, mirrored. Held-out records are neither flipped nor are their captions dropped.
    """

    def __init__(self, data: Data, pictures: PictureEntries, captions: CacheManifest) -> None:
        self._record_addresses = pictures.record_addresses
        self._references = captions.references  # the empty caption, then by record and variant
        starts = np.flatnonzero(self._references["variant"] == 0)[1:]
        ends = np.append(starts[1:], len(self._references))
        listed = np.flatnonzero(pictures.bucket_of >= 0)
        if len(listed) != len(starts):
            raise DataFault(f"{captions.folder}: a list of {len(starts)} records, not of {len(listed)}; remove it")
        self._first, self._count = np.zeros(data.index.count, np.int64), np.zeros(data.index.count, np.int64)
        self._first[listed], self._count[listed] = starts, ends - starts
        if 2 * (int(self._count.max(initial=0)) + 1) > _MAX_VARIANT:
            name = data.index.record(int(self._count.argmax())).name
            raise DataFault(
                f"{name} has {self._count.max():,} captions; an encoder that reads the image allows at most {_MAX_VARIANT // 2 - 1:,}"
            )
        self._is_held_out = held_out(data)
        sources = np.asarray(data.index.columns().source)
        drops = [may_drop(recipe.captions) for recipe in data.recipes]
        self._drops = np.array(drops)[sources] & ~self._is_held_out
        self._flips = pictures.flips & ~self._is_held_out

    def rows(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the rows of records in their order, the pairs of each together. Shapes: ids (n,) -> pieces (m,) ROW."""
        for start in range(0, len(ids), _RECORDS):
            yield self._rows(ids[start : start + _RECORDS])

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        # each caption of each record
        counts = self._count[ids]
        row = np.repeat(np.arange(len(ids)), counts)
        at = np.repeat(self._first[ids] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        number = self._references["variant"][at].astype(np.int64) + 1

        # and the empty one, which is the first row of all
        dropping = np.flatnonzero(self._drops[ids])
        row, at = np.append(row, dropping), np.append(at, np.zeros_like(dropping))
        number = np.append(number, np.full_like(dropping, DROPPED))

        # beside the picture as it is, and mirrored
        mirrored = np.flatnonzero(self._flips[ids][row])
        flip = np.append(np.zeros_like(row), np.ones_like(mirrored))
        row, at, number = (np.append(array, array[mirrored]) for array in (row, at, number))

        order = np.lexsort((flip, number, row))
        row, at, number, flip = (array[order] for array in (row, at, number, flip))
        alone = [address.tobytes() for address in self._record_addresses[ids[row], flip]]
        readable = np.array([address != UNREAD for address in alone], dtype=bool)
        texts = [address.tobytes() for address in self._references["address"][at]]
        rows = np.zeros(len(row), dtype=ROW)
        rows["record"], rows["variant"], rows["plain"] = ids[row], 2 * number + flip, self._is_held_out[ids[row]]
        rows["address"] = as_array([joined_address(pair) for pair in zip(alone, texts, strict=True)])
        return rows[readable]
