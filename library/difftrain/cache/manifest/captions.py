"""Listing captions: every one that training can draw, tokenised once for all encoders, and only where it is new.

Of a list of an earlier index the records are taken over whose captions, and the way they are drawn, have not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from difftrain.cache.manifest.address import BYTES, as_array, text_addresses, without_augmentation
from difftrain.cache.manifest.content_hash import Log
from difftrain.cache.manifest.manifest import (
    FACTS,
    NO_RECORD,
    ROW,
    VERSION,
    ManifestRequest,
    ManifestWriter,
    reference_rows,
    write_manifest,
)
from difftrain.contracts import Bucket, Tokenize
from difftrain.data.index.index import DATABASE, connect
from difftrain.data.index.writer import disk_faults
from difftrain.data.samples import captions_of

if TYPE_CHECKING:
    from difftrain.data.prepare import Data
    from difftrain.data.recipe import Recipe

NO_BUCKET = Bucket(0, 0)
CAPTION_STATE = "told.npy"  # of a list: what decides the captions of each of its records, in their order
_TOKENISED_AT_ONCE = 2048  # captions that are tokenised at once
_RECORDS = 1 << 14
_SAY_EVERY_S = 10.0
_CAPTIONS = """
SELECT records.row, records.captions, files.source FROM records JOIN files ON files.id = records.file
"""


def caption_settings(recipe: Recipe) -> list[Any]:
    """Return all that a recipe says of captions, as JSON values."""
    return [recipe.captions.model_dump(mode="json"), recipe.num_variants]


def tokenizer_identity(tokenize: Tokenize) -> str:
    """Return what tells a tokenizer from another: what it says of itself, or all of it.

    What it does to a text before is no part of an entry's address, which is of the tokens: a text that stays as it is keeps
    its entry, of whatever version, and lists of captions are written anew.
    """
    identity = getattr(tokenize, "identity", None)
    if not isinstance(identity, str):
        return hashlib.blake2b(pickle.dumps(tokenize), digest_size=BYTES).hexdigest()
    return " ".join(filter(None, (identity, getattr(tokenize, "cleaning", ""))))


def caption_kind(request: ManifestRequest, tokenize: Tokenize) -> str:
    """Hash what decides the address of a caption."""
    parts = [
        VERSION,
        request.name,
        request.fingerprint,
        request.storage,
        request.encoder.inputs,
        tokenizer_identity(tokenize),
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=BYTES).hexdigest()


def write_captions(
    data: Data, ids: np.ndarray, writers: Sequence[ManifestWriter], tokenize: Tokenize, log: Log
) -> None:
    """List every caption that records can be drawn with, and "". ids: of the records, ascending."""
    index, is_held_out = data.index, held_out(data)
    caption_state = _caption_state(data, is_held_out)[ids]
    earlier = _PreviousManifests.of(
        writers, index.folder.parent, [caption_kind(writer.request, tokenize) for writer in writers]
    )

    # rows are written for all encoders together: each caption is tokenised once
    with disk_faults(index.folder):
        asides = [writer.open_aside() for writer in writers]
        files = [(aside / "rows.bin").open("wb") for aside in asides]
        for pieces in _rows(
            data, ids, is_held_out, caption_state, earlier, [writer.request for writer in writers], tokenize, log
        ):
            for file, piece in zip(files, pieces, strict=True):
                file.write(piece.tobytes())
        for writer, aside, file in zip(writers, asides, files, strict=True):
            file.close()
            np.save(aside / CAPTION_STATE, caption_state)
            every = np.memmap(aside / "rows.bin", dtype=ROW, mode="r")
            references = reference_rows(index.columns().keys, every)
            facts = writer.facts(writer.request.batch_size, kind=caption_kind(writer.request, tokenize))
            write_manifest(
                aside, facts, every, lambda r: np.zeros(len(r), np.int64), [NO_BUCKET], references, len(every)
            )
            (aside / "rows.bin").unlink()
            writer.publish(aside)


def held_out(data: Data) -> np.ndarray:
    """Tell of each record whether it is kept for validation, and so drawn as it is written. Shape: (N,) bool."""
    is_held_out = np.zeros(data.index.count, dtype=bool)
    for rows in data.tables.validation:
        is_held_out[data.tables.ids()[rows.first : rows.first + rows.records]] = True
    return is_held_out


def _caption_state(data: Data, is_held_out: np.ndarray) -> np.ndarray:
    """Hash what decides the captions of each record: what is written, and how they are drawn. Shape: (N, 16) uint8."""
    index = data.index
    rows = np.asarray(index.columns().row)
    ids = np.zeros(int(rows.max(initial=0)) + 1, dtype=np.uint32)
    ids[rows] = np.arange(len(rows), dtype=np.uint32)
    ways = [
        [
            hashlib.blake2b(json.dumps([as_it_is, caption_settings(recipe)]).encode(), digest_size=BYTES)
            for recipe in recipes
        ]
        for as_it_is, recipes in ((False, data.recipes), (True, without_augmentation(data.recipes)))
    ]
    caption_state = np.zeros((index.count, BYTES), dtype=np.uint8)
    with contextlib.closing(connect(index.folder / DATABASE)) as database:
        for row, captions, source in database.execute(_CAPTIONS):
            record_id = int(ids[row])
            state = ways[int(is_held_out[record_id])][source].copy()
            state.update(captions.encode("utf-8", "surrogatepass"))
            caption_state[record_id] = np.frombuffer(state.digest(), np.uint8)
    return caption_state


class _PreviousManifests:
    """Lists of an earlier state of the data, one of each encoder, of the same records."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._references = [np.load(folder / "uses.npy", mmap_mode="r") for folder in folders]
        self._caption_state: np.ndarray = np.load(folders[0] / CAPTION_STATE)
        self._starts = np.flatnonzero(self._references[0]["variant"] == 0)[1:]  # behind the empty caption
        self._ends = np.append(self._starts[1:], len(self._references[0]))
        keys = np.array(self._references[0]["key"][self._starts]).view(np.uint8).reshape(-1, BYTES)
        self._keys, self._words = keys, _first_word(keys)
        alike = all(np.array_equal(self._caption_state, np.load(folder / CAPTION_STATE)) for folder in folders[1:])
        if not alike or len(self._starts) != len(self._caption_state):
            raise ValueError("these lists belong to different records")

    @classmethod
    def of(cls, writers: Sequence[ManifestWriter], beside: Path, kinds: Sequence[str]) -> _PreviousManifests | None:
        """Find the newest lists of the same encoders and tokenizers; None where an encoder has none."""
        newest = []
        for writer, kind in zip(writers, kinds, strict=True):
            positions = [path for path in beside.glob(f"index-*/wanted-{writer.request.name}-*") if _kind(path) == kind]
            newest.append(max(positions, key=lambda path: path.stat().st_mtime_ns, default=None))
        with contextlib.suppress(OSError, ValueError):
            return cls([path for path in newest if path is not None]) if None not in newest else None
        return None

    def find(self, keys: np.ndarray, caption_state: np.ndarray) -> np.ndarray:
        """Return the places of records that are as they were, -1 for others. Shapes: (n, 16) uint8 -> (n,)."""
        if not len(self._words):
            return np.full(len(keys), -1)
        index = np.searchsorted(self._words, _first_word(keys)).clip(max=len(self._words) - 1)
        same = (self._keys[index] == keys).all(axis=1) & (self._caption_state[index] == caption_state).all(axis=1)
        return np.where(same, index, -1)

    def rows(self, which: int, positions: np.ndarray, ids: np.ndarray, is_held_out: np.ndarray) -> np.ndarray:
        """Return the rows of records that are as they were, under their new ids. Shape: (M,) ROW."""
        counts = self._ends[positions] - self._starts[positions]
        firsts = np.repeat(self._starts[positions] - np.cumsum(counts) + counts, counts)
        references = self._references[which][firsts + np.arange(counts.sum())]
        rows = np.zeros(len(references), dtype=ROW)
        rows["address"], rows["variant"] = references["address"], references["variant"]
        rows["record"], rows["plain"] = np.repeat(ids, counts), np.repeat(is_held_out[ids], counts)
        return rows


def _kind(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((folder / FACTS).read_text(encoding="utf-8")).get("kind"))
    return ""


def _first_word(keys: np.ndarray) -> np.ndarray:
    """Return the first halves of keys as numbers in the order of the keys. Shapes: (n, 16) uint8 -> (n,) uint64."""
    return np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)[:, 0].astype(np.uint64)


def _rows(
    data: Data,
    ids: np.ndarray,
    is_held_out: np.ndarray,
    caption_state: np.ndarray,
    earlier: _PreviousManifests | None,
    requests: Sequence[ManifestRequest],
    tokenize: Tokenize,
    log: Log,
) -> Iterator[list[np.ndarray]]:
    """Yield rows of each list: the empty caption, then by record and variant."""
    keys, began = data.index.columns().keys, time.monotonic()
    reported = began
    yield _tokenised([(b"", NO_RECORD, 0, 0, 0)], [""], requests, tokenize)
    for start in range(0, len(ids), _RECORDS):
        some = ids[start : start + _RECORDS]
        positions = np.full(len(some), -1)
        if earlier is not None:
            positions = earlier.find(np.asarray(keys[some]), caption_state[start : start + _RECORDS])

        # records that are as they were keep their rows
        old, kept = positions >= 0, [np.empty(0, ROW) for _ in requests]
        if earlier is not None and old.any():
            kept = [earlier.rows(which, positions[old], some[old], is_held_out) for which in range(len(requests))]

        # all others are tokenised
        fresh: list[list[np.ndarray]] = []
        for done, (facts, captions) in _drawn_captions(data, some[~old].tolist(), is_held_out):
            fresh.append(_tokenised(facts, captions, requests, tokenize))
            if (now := time.monotonic()) - reported > _SAY_EVERY_S:
                reported, count = now, start + done
                left = (len(ids) / count - 1) * (now - began) / 60
                log(f"cache: the captions of {count:,} of {len(ids):,} records are tokenised, {left:.1f} min left")
        pieces = [np.concatenate([kept[which], *(piece[which] for piece in fresh)]) for which in range(len(requests))]
        yield [piece[np.lexsort((piece["variant"], piece["record"]))] for piece in pieces]


def _drawn_captions(
    data: Data, ids: Sequence[int], is_held_out: np.ndarray
) -> Iterator[tuple[int, tuple[list[tuple[Any, ...]], list[str]]]]:
    """Yield how many records are done, rows without addresses, and their captions."""
    recipes = [data.recipes, without_augmentation(data.recipes)]
    facts: list[tuple[Any, ...]] = []
    captions: list[str] = []
    for done, record_id in enumerate(ids, start=1):
        record, as_written = data.index.record(record_id), bool(is_held_out[record_id])
        for variant, caption in enumerate(captions_of(record, recipes[as_written][record.media.source])):
            facts.append((b"", record_id, variant, as_written, 0))
            captions.append(caption)
        if len(captions) >= _TOKENISED_AT_ONCE or done == len(ids):
            yield done, (facts, captions)
            facts, captions = [], []


def _tokenised(
    facts: list[tuple[Any, ...]], captions: list[str], requests: Sequence[ManifestRequest], tokenize: Tokenize
) -> list[np.ndarray]:
    """Return rows with the addresses of their captions, for each encoder. Equal captions are tokenised once."""
    distinct = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    back, tokens = [distinct[caption] for caption in captions], tokenize(list(distinct))
    made = []
    for request in requests:
        rows = np.array(facts, dtype=ROW)
        addresses = text_addresses(tokens, request.encoder.inputs, request.fingerprint, request.storage)
        rows["address"] = as_array(addresses)[back]
        made.append(rows)
    return made
