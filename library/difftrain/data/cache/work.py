"""What is to be encoded: the pictures of every bucket, their masks, and every caption that training can draw."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from difftrain.contracts import Bucket, Encoder, Feature, Reject, Tokenize
from difftrain.data.cache.address import BYTES, V16
from difftrain.data.cache.contents import Say, picture_contents
from difftrain.data.cache.cuts import MASK_VERSION, Cuts, settings_of
from difftrain.data.cache.mask_contents import WHOLE, mask_contents
from difftrain.data.cache.texts import identity_of, words_of, write_captions
from difftrain.data.cache.wanted import FACTS, LOST, ROW, VERSION, Facts, use_rows, write
from difftrain.data.index_writer import disk_faults

if TYPE_CHECKING:
    from difftrain.data.index import Index
    from difftrain.data.prepare import Data
    from difftrain.data.recipe import Recipe
    from difftrain.data.tables import BucketRows, Tables

MASKS = "masks"  # name of what is made of masks; its feature is "mask"
_KEPT = 8  # lists of one name: settings come and go
_STALE_S = 24 * 3600.0
_ROWS = 1 << 18


@dataclass(frozen=True)
class Asked:
    """One encoder whose features are wanted. batch_size: entries that it takes at once.

    storage: all that decides how its features are stored, as part of their addresses.
    """

    name: str
    encoder: Encoder
    fingerprint: str
    storage: str
    batch_size: int


def mask_encoder(recipes: Sequence[Recipe]) -> Encoder | None:
    """Return what makes masks of the loss: workers do, nothing is left to a device. None where no picture has one."""
    if not any(recipe.has_masks for recipe in recipes):
        return None
    return Encoder(
        source="pixels",
        features={"mask": Feature(1, factor=1, dtype="uint8")},
        modules=(),
        settings="",
        encode=lambda batch: {"mask": batch.features["mask"]},
        fingerprint=lambda: f"masks {MASK_VERSION}",
    )


def build_wanted(
    data: Data, asked: Sequence[Asked], tokenize: Tokenize, *, look: bool = True, say: Say = print
) -> dict[str, Path]:
    """List what is wanted of each encoder, and return the folder of each list (see Wanted). One process a machine.

    look: hash pictures and masks whose content is not known; else they are left out, and Wanted.passed names them.
    Raises: TrainingFault where the disk is full.
    """
    captions = [each for each in asked if each.encoder.source == "caption"]
    lists = [_pictures(data, each, look, say) for each in asked if each.encoder.source == "pixels"]
    texts = [List(data.index, each, _caption_words(data, tokenize)) for each in captions]
    if absent := [each for each in texts if not each.is_there]:
        ids = np.flatnonzero(_placed(data.tables, data.index.count)[1] >= 0)
        write_captions(data, ids, absent, tokenize, say)
    return {each.asked.name: each.folder for each in (*lists, *texts)}


class List:
    """The folder of a list, in the index; where nothing can be written there, a temporary one of this process."""

    def __init__(self, index: Index, asked: Asked, words: Any) -> None:
        state = hashlib.blake2b(digest_size=12)
        parts = [VERSION, asked.name, asked.fingerprint, asked.storage, asked.batch_size, asked.encoder.inputs, words]
        state.update(json.dumps(parts, sort_keys=True).encode())
        self._index, self.asked = index, asked
        self.folder = index.folder / f"wanted-{asked.name}-{state.hexdigest()}"

    @property
    def is_there(self) -> bool:
        """Tell whether the list is written, and that it is used."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)
        return (self.folder / FACTS).is_file()

    def begin(self) -> Path:
        """Return a folder to write the list into."""
        aside = self._index.folder / f"tmp-{uuid.uuid4().hex}"
        for path in self._index.folder.glob("tmp-*"):  # what a kill left behind, a day later
            if path.stat().st_mtime < time.time() - _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
        try:
            aside.mkdir()
        except OSError:  # a cache that can only be read
            aside = Path(tempfile.mkdtemp(prefix="difftrain-wanted-"))
            atexit.register(shutil.rmtree, aside, ignore_errors=True)
        return aside

    def settle(self, aside: Path) -> None:
        """Give the list its name, for all that start later."""
        if aside.parent != self._index.folder:
            self.folder = aside
            return
        try:
            aside.rename(self.folder)
        except OSError:  # another process was faster, with the same list
            shutil.rmtree(aside, ignore_errors=True)
        older = sorted(self._index.folder.glob(f"wanted-{self.asked.name}-*"), key=lambda path: path.stat().st_mtime)
        for path in older[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def facts(self, batch_size: int, passed: Sequence[Reject] = (), kind: str = "") -> Facts:
        """Return what the list says of itself."""
        asked = self.asked
        return Facts(asked.name, asked.fingerprint, asked.storage, batch_size, asked.encoder.inputs, passed, kind)


def _pictures(data: Data, asked: Asked, look: bool, say: Say) -> List:
    """List the pictures of the tables or their masks, held out or not: a split changes nothing here."""
    index, recipes, masks = data.index, data.recipes, asked.name == MASKS
    buckets, bucket_of = _placed(data.tables, index.count)
    sources = np.asarray(index.columns().source)
    wanted = bucket_of >= 0
    if masks:
        wanted &= np.array([recipe.has_masks for recipe in recipes])[sources]
    ids = np.flatnonzero(wanted)
    if masks:
        contents, passed = mask_contents(index, recipes, ids, look=look, say=say)
        ids = ids[(contents[ids] != WHOLE).any(axis=1)]
    else:
        contents, passed = picture_contents(index, ids, look=look, say=say)
    known = hashlib.blake2b(contents[ids].tobytes(), digest_size=BYTES).hexdigest()
    found = List(index, asked, [data.tables.folder.name, [settings_of(recipe) for recipe in recipes], known])
    if found.is_there:
        return found
    flips = np.array([recipe.flip for recipe in recipes])[sources]
    variants = 2 if flips[ids].any() else 1
    cuts = Cuts(recipes, asked.fingerprint, asked.storage, masks=masks)
    places = _addresses(index, cuts, ids, contents, flips, variants)
    ordered = ids[np.lexsort((ids, np.asarray(index.columns().shard)[ids], sources[ids], bucket_of[ids]))]
    even = asked.batch_size + asked.batch_size % variants  # a picture and its mirror image come in one batch
    rows, keys = _rows(ordered, places), index.columns().keys
    uses = (
        piece
        for start in range(0, len(ids), _ROWS)
        for piece in use_rows(keys, _rows(ids[start : start + _ROWS], places))
    )
    with disk_faults(index.folder):
        aside = found.begin()
        write(aside, found.facts(even, passed), rows, lambda r: bucket_of[r], buckets, uses, len(rows), places)
        found.settle(aside)
    return found


def _placed(tables: Tables, count: int) -> tuple[list[Bucket], np.ndarray]:
    """Return the buckets in order, and the place of each record's among them, -1 for none."""
    runs = (*tables.training, *tables.validation)
    buckets = sorted({rows.bucket for rows in runs})
    bucket_of = np.full(count, -1, dtype=np.int32)
    for rows in runs:
        bucket_of[_ids(tables, rows)] = buckets.index(rows.bucket)
    return buckets, bucket_of


def _ids(tables: Tables, rows: BucketRows) -> np.ndarray:
    return np.array(tables.ids()[rows.first : rows.first + rows.records])


def _addresses(
    index: Index, cuts: Cuts, ids: np.ndarray, contents: np.ndarray, flips: np.ndarray, variants: int
) -> np.ndarray:
    """Make the addresses of pictures, those of one size together. Shape: (N, variants, 16) uint8, by id."""
    columns = index.columns()
    places = np.zeros((index.count, variants, BYTES), dtype=np.uint8)
    sizes = [np.asarray(each)[ids].astype(np.uint64) for each in (columns.source, columns.height, columns.width)]
    order = np.lexsort(sizes[::-1])
    new = np.flatnonzero(np.any([np.diff(each[order]) != 0 for each in sizes], axis=0)) + 1
    for group in np.split(order, new) if len(order) else ():
        own, first = ids[group], group[0]
        source, height, width = (int(each[first]) for each in sizes)
        bytes_of = contents[own].tobytes()
        for variant in range(1 + bool(flips[own[0]])):
            state, made = cuts.state(source, (height, width), variant == 1), bytearray()
            for start in range(0, len(bytes_of), BYTES):
                each = state.copy()
                each.update(bytes_of[start : start + BYTES])
                made += each.digest()
            places[own, variant] = np.frombuffer(made, np.uint8).reshape(-1, BYTES)
    places[ids[~contents[ids].any(axis=1)]] = np.frombuffer(LOST, np.uint8)
    return places


def _rows(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return what is wanted of pictures, each and its mirror image. Shape: (M,) ROW."""
    variants = places.shape[1]
    rows = np.zeros(len(ids) * variants, dtype=ROW)
    rows["record"], rows["variant"] = np.repeat(ids, variants), np.tile(np.arange(variants), len(ids))
    found = places[ids].reshape(-1, BYTES)
    rows["address"] = found.view(V16).reshape(-1)
    words = found.view(np.uint64)
    return rows[(words[:, 0] != words[:, 1]) | ((words[:, 0] + np.uint64(1)) > 1)]  # neither nothing nor LOST


def _caption_words(data: Data, tokenize: Tokenize) -> list[Any]:
    """Return all that decides the captions and their tokens."""
    return [data.tables.folder.name, [words_of(recipe) for recipe in data.recipes], identity_of(tokenize)]
