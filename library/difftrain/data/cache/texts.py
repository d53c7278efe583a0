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

from difftrain.contracts import Bucket, Tokenize
from difftrain.data.cache.address import BYTES, as_array, text_addresses
from difftrain.data.cache.contents import Say
from difftrain.data.cache.cuts import plain
from difftrain.data.cache.wanted import FACTS, NOBODY, ROW, VERSION, use_rows, write
from difftrain.data.index import DATABASE, connect
from difftrain.data.index_writer import disk_faults
from difftrain.data.samples import captions_of

if TYPE_CHECKING:
    from difftrain.data.cache.work import Asked, List
    from difftrain.data.prepare import Data
    from difftrain.data.recipe import Recipe

NO_BUCKET = Bucket(0, 0)
TOLD = "told.npy"  # of a list: what decides the captions of each of its records, in their order
_LOOK = 2048  # captions that are tokenised at once
_RECORDS = 1 << 14
_SAY_EVERY_S = 10.0
_CAPTIONS = """
SELECT records.row, records.captions, files.source FROM records JOIN files ON files.id = records.file
"""


def words_of(recipe: Recipe) -> list[Any]:
    """Return all that a recipe says of captions, as JSON values."""
    return [recipe.captions.model_dump(mode="json"), recipe.num_variants]


def identity_of(tokenize: Tokenize) -> str:
    """Return what tells a tokenizer from another: what it says of itself, or all of it."""
    said = getattr(tokenize, "identity", None)
    return said if isinstance(said, str) else hashlib.blake2b(pickle.dumps(tokenize), digest_size=BYTES).hexdigest()


def kind_of(asked: Asked, tokenize: Tokenize) -> str:
    """Hash what decides the address of a caption."""
    parts = [VERSION, asked.name, asked.fingerprint, asked.storage, asked.encoder.inputs, identity_of(tokenize)]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=BYTES).hexdigest()


def write_captions(data: Data, ids: np.ndarray, lists: Sequence[List], tokenize: Tokenize, say: Say) -> None:
    """List every caption that records can be drawn with, and "". ids: of the records, ascending."""
    index, held = data.index, np.zeros(data.index.count, dtype=bool)
    for rows in data.tables.validation:
        held[data.tables.ids()[rows.first : rows.first + rows.records]] = True
    told = _told(data, held)[ids]
    earlier = _Earlier.of(lists, index.folder.parent, [kind_of(each.asked, tokenize) for each in lists])
    with disk_faults(index.folder):
        asides = [each.begin() for each in lists]
        files = [(aside / "rows.bin").open("wb") for aside in asides]
        for pieces in _rows(data, ids, held, told, earlier, [each.asked for each in lists], tokenize, say):
            for file, piece in zip(files, pieces, strict=True):
                file.write(piece.tobytes())
        for each, aside, file in zip(lists, asides, files, strict=True):
            file.close()
            np.save(aside / TOLD, told)
            every = np.memmap(aside / "rows.bin", dtype=ROW, mode="r")
            uses = use_rows(index.columns().keys, every)
            facts = each.facts(each.asked.batch_size, kind=kind_of(each.asked, tokenize))
            write(aside, facts, every, lambda r: np.zeros(len(r), np.int64), [NO_BUCKET], uses, len(every))
            (aside / "rows.bin").unlink()
            each.settle(aside)


def _told(data: Data, held: np.ndarray) -> np.ndarray:
    """Hash what decides the captions of each record: what is written, and how they are drawn. Shape: (N, 16) uint8."""
    index = data.index
    rows = np.asarray(index.columns().row)
    ids = np.zeros(int(rows.max(initial=0)) + 1, dtype=np.uint32)
    ids[rows] = np.arange(len(rows), dtype=np.uint32)
    ways = [
        [hashlib.blake2b(json.dumps([as_it_is, words_of(recipe)]).encode(), digest_size=BYTES) for recipe in recipes]
        for as_it_is, recipes in ((False, data.recipes), (True, plain(data.recipes)))
    ]
    told = np.zeros((index.count, BYTES), dtype=np.uint8)
    with contextlib.closing(connect(index.folder / DATABASE)) as database:
        for row, captions, source in database.execute(_CAPTIONS):
            record_id = int(ids[row])
            state = ways[int(held[record_id])][source].copy()
            state.update(captions.encode("utf-8", "surrogatepass"))
            told[record_id] = np.frombuffer(state.digest(), np.uint8)
    return told


class _Earlier:
    """Lists of an earlier state of the data, one of each encoder, of the same records."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._uses = [np.load(folder / "uses.npy", mmap_mode="r") for folder in folders]
        self._told: np.ndarray = np.load(folders[0] / TOLD)
        self._starts = np.flatnonzero(self._uses[0]["variant"] == 0)[1:]  # behind the empty caption
        self._ends = np.append(self._starts[1:], len(self._uses[0]))
        keys = np.array(self._uses[0]["key"][self._starts]).view(np.uint8).reshape(-1, BYTES)
        self._keys, self._words = keys, _first_word(keys)
        alike = all(np.array_equal(self._told, np.load(folder / TOLD)) for folder in folders[1:])
        if not alike or len(self._starts) != len(self._told):
            raise ValueError("these lists are not of the same records")

    @classmethod
    def of(cls, lists: Sequence[List], beside: Path, kinds: Sequence[str]) -> _Earlier | None:
        """Find the newest lists of the same encoders and tokenizers; None where an encoder has none."""
        found = []
        for each, kind in zip(lists, kinds, strict=True):
            places = [place for place in beside.glob(f"index-*/wanted-{each.asked.name}-*") if _kind(place) == kind]
            found.append(max(places, key=lambda place: place.stat().st_mtime_ns, default=None))
        with contextlib.suppress(OSError, ValueError):
            return cls([place for place in found if place is not None]) if None not in found else None
        return None

    def find(self, keys: np.ndarray, told: np.ndarray) -> np.ndarray:
        """Return the places of records that are as they were, -1 for others. Shapes: (n, 16) uint8 -> (n,)."""
        if not len(self._words):
            return np.full(len(keys), -1)
        place = np.searchsorted(self._words, _first_word(keys)).clip(max=len(self._words) - 1)
        same = (self._keys[place] == keys).all(axis=1) & (self._told[place] == told).all(axis=1)
        return np.where(same, place, -1)

    def rows(self, which: int, places: np.ndarray, ids: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Return the rows of records that are as they were, under their new ids. Shape: (M,) ROW."""
        counts = self._ends[places] - self._starts[places]
        firsts = np.repeat(self._starts[places] - np.cumsum(counts) + counts, counts)
        uses = self._uses[which][firsts + np.arange(counts.sum())]
        rows = np.zeros(len(uses), dtype=ROW)
        rows["address"], rows["variant"] = uses["address"], uses["variant"]
        rows["record"], rows["plain"] = np.repeat(ids, counts), np.repeat(held[ids], counts)
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
    held: np.ndarray,
    told: np.ndarray,
    earlier: _Earlier | None,
    asked: Sequence[Asked],
    tokenize: Tokenize,
    say: Say,
) -> Iterator[list[np.ndarray]]:
    """Yield rows of each list: the empty caption, then by record and variant."""
    keys, began = data.index.columns().keys, time.monotonic()
    said = began
    yield _tokenised([(b"", NOBODY, 0, 0, 0)], [""], asked, tokenize)
    for start in range(0, len(ids), _RECORDS):
        some = ids[start : start + _RECORDS]
        places = np.full(len(some), -1)
        if earlier is not None:
            places = earlier.find(np.asarray(keys[some]), told[start : start + _RECORDS])
        old, kept = places >= 0, [np.empty(0, ROW) for _ in asked]
        if earlier is not None and old.any():
            kept = [earlier.rows(which, places[old], some[old], held) for which in range(len(asked))]
        fresh: list[list[np.ndarray]] = []
        for done, (facts, captions) in _drawn(data, some[~old].tolist(), held):
            fresh.append(_tokenised(facts, captions, asked, tokenize))
            if (now := time.monotonic()) - said > _SAY_EVERY_S:
                said, count = now, start + done
                left = (len(ids) / count - 1) * (now - began) / 60
                say(f"cache: the captions of {count:,} of {len(ids):,} records are tokenised, {left:.1f} min left")
        pieces = [np.concatenate([kept[which], *(each[which] for each in fresh)]) for which in range(len(asked))]
        yield [piece[np.lexsort((piece["variant"], piece["record"]))] for piece in pieces]


def _drawn(
    data: Data, ids: Sequence[int], held: np.ndarray
) -> Iterator[tuple[int, tuple[list[tuple[Any, ...]], list[str]]]]:
    """Yield how many records are done, rows without addresses, and their captions."""
    recipes = [data.recipes, plain(data.recipes)]
    facts: list[tuple[Any, ...]] = []
    captions: list[str] = []
    for done, record_id in enumerate(ids, start=1):
        record, as_written = data.index.record(record_id), bool(held[record_id])
        for variant, caption in enumerate(captions_of(record, recipes[as_written][record.media.source])):
            facts.append((b"", record_id, variant, as_written, 0))
            captions.append(caption)
        if len(captions) >= _LOOK or done == len(ids):
            yield done, (facts, captions)
            facts, captions = [], []


def _tokenised(
    facts: list[tuple[Any, ...]], captions: list[str], asked: Sequence[Asked], tokenize: Tokenize
) -> list[np.ndarray]:
    """Return rows with the addresses of their captions, for each encoder. Equal captions are tokenised once."""
    distinct = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    back, tokens = [distinct[caption] for caption in captions], tokenize(list(distinct))
    made = []
    for each in asked:
        rows = np.array(facts, dtype=ROW)
        found = text_addresses(tokens, each.encoder.inputs, each.fingerprint, each.storage)
        rows["address"] = as_array(found)[back]
        made.append(rows)
    return made
