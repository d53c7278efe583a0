"""Hashes of the masks of pictures: of the picture itself where its alpha is the mask, else of the mask's own file."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

import numpy as np

from difftrain.contracts import Reject
from difftrain.data.cache.address import BYTES
from difftrain.data.cache.contents import FOLDER, Bytes, Known, Say, fill, hash_all, only_first, picture_contents, save
from difftrain.data.media import Unusable

if TYPE_CHECKING:
    from difftrain.data.index import Index
    from difftrain.data.recipe import Recipe


WHOLE = np.ones(BYTES, np.uint8)  # content of the mask of a picture that has none, and counts as a whole


def mask_contents(
    index: Index, recipes: Sequence[Recipe], wanted: np.ndarray, *, look: bool, say: Say
) -> tuple[np.ndarray, list[Reject]]:
    """Return the content of every record's mask, and which of the wanted ones have none and why.

    wanted: ids, ascending, of records that have a mask. look: see whether the files are what they were; else what is
    known of them counts. Shape: (N, 16) uint8, zeros where it is not known, WHOLE where there is none.
    """
    apart = np.array([recipe.masks is not None for recipe in recipes])[np.asarray(index.columns().source)[wanted]]
    contents, rejects = np.zeros((index.count, BYTES), np.uint8), list[Reject]()
    if not apart.all():
        found, rejects = picture_contents(index, wanted[~apart], look=look, say=say)
        contents[wanted[~apart]] = found[wanted[~apart]]
    if apart.any():
        files, more = _of_files(index, recipes, wanted[apart], look, say)
        contents[wanted[apart]] = files[wanted[apart]]
        rejects += more
    return contents, rejects


def _of_files(
    index: Index, recipes: Sequence[Recipe], wanted: np.ndarray, look: bool, say: Say
) -> tuple[np.ndarray, list[Reject]]:
    folders = json.dumps([recipe.masks and astuple(recipe.masks) for recipe in recipes]).encode()
    column = index.folder / f"masks-{hashlib.blake2b(folders, digest_size=6).hexdigest()}.npy"
    if not look:
        with contextlib.suppress(OSError, ValueError):
            found: np.ndarray = np.load(column)
            if found.shape == (index.count, BYTES):
                left = wanted[~found[wanted].any(axis=1)]
                reason = "unreadable: what its mask holds is not known, and nothing is read now"
                return found, [Reject(index.path(index.record(int(each))), reason) for each in left]
    contents, stamps, rejects = np.zeros((index.count, BYTES), np.uint8), np.zeros((index.count, BYTES), np.uint8), []
    mine = np.zeros(index.count, dtype=bool)
    mine[wanted] = True
    whole = []
    for place in _masks(index, recipes, mine):
        if isinstance(place, Reject):
            rejects.append(place)
        elif isinstance(place, int):
            whole.append(place)
        else:
            stamps[place.record_id] = np.frombuffer(place.stamp, np.uint8)
    known = Known(index.folder.parent / FOLDER)
    contents[wanted] = known.lookup(stamps[wanted])
    contents[whole] = WHOLE
    mine &= stamps.any(axis=1) & ~contents.any(axis=1)
    if mine.any():
        once = only_first(mine, stamps)  # one mask may serve many pictures
        work = (place for place in _masks(index, recipes, once) if isinstance(place, Bytes))
        rejects += hash_all(index, work, int(once.sum()), known, contents, look=look, say=say)
        fill(contents, mine & ~once, once, stamps)
    here = wanted[contents[wanted].any(axis=1) & stamps[wanted].any(axis=1)]
    known.close(stamps[here], contents[here])
    save(column, contents)
    return contents, rejects


def _masks(index: Index, recipes: Sequence[Recipe], wanted: np.ndarray) -> Iterator[Bytes | Reject | int]:
    """Iterate over the mask files of records; of one that counts as a whole, its id. Shape: wanted (N,) bool."""
    rows = np.asarray(index.columns().row)
    ids = np.zeros(int(rows.max(initial=0)) + 1, dtype=np.uint32)
    ids[rows] = np.arange(len(rows), dtype=np.uint32)
    sources = [info.ordinal for info in index.sources if recipes[info.ordinal].masks]
    for row, source, path, member in index.places(sources):
        record_id = int(ids[row])
        masks = recipes[source].masks
        if not wanted[record_id] or masks is None:
            continue
        try:
            file = masks.find(path if member is None else member)
            if file is None:
                yield record_id
                continue
            found = file.stat()
            yield Bytes(record_id, None, str(file), found.st_size, found.st_mtime_ns)
        except (Unusable, OSError) as error:
            yield Reject(index.path(index.record(record_id)), str(error))
