"""Hashes of the masks of pictures: of the picture itself where its alpha is the mask, else of the mask's own file."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

import numpy as np

from difftrain.cache.manifest.address import BYTES
from difftrain.cache.manifest.content_hash import (
    FOLDER,
    KnownHashes,
    MediaBytes,
    Say,
    copy_to_duplicates,
    first_of_duplicates,
    hash_media,
    picture_contents,
    save_array,
)
from difftrain.contracts import Reject
from difftrain.data.media.media import Unusable

if TYPE_CHECKING:
    from difftrain.data.index.index import Index
    from difftrain.data.recipe import Recipe


NO_MASK = np.ones(BYTES, np.uint8)  # content of the mask of a picture that has none, and counts as a whole


def mask_contents(
    index: Index, recipes: Sequence[Recipe], wanted: np.ndarray, *, look: bool, say: Say
) -> tuple[np.ndarray, list[Reject]]:
    """Return the content of every record's mask, and which of the wanted ones have none and why.

    wanted: ids, ascending, of records that have a mask. look: see whether the files are what they were; else what is
    known of them counts. Shape: (N, 16) uint8, zeros where it is not known, NO_MASK where there is none.
    """
    apart = np.array([recipe.masks is not None for recipe in recipes])[np.asarray(index.columns().source)[wanted]]
    contents, rejects = np.zeros((index.count, BYTES), np.uint8), list[Reject]()
    if not apart.all():
        found, rejects = picture_contents(index, wanted[~apart], look=look, say=say)
        contents[wanted[~apart]] = found[wanted[~apart]]
    if apart.any():
        files, more = _mask_file_contents(index, recipes, wanted[apart], look, say)
        contents[wanted[apart]] = files[wanted[apart]]
        rejects += more
    return contents, rejects


def _mask_file_contents(
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

    # the mask file of each record, by its stamp
    contents, stamps, rejects = np.zeros((index.count, BYTES), np.uint8), np.zeros((index.count, BYTES), np.uint8), []
    mine = np.zeros(index.count, dtype=bool)
    mine[wanted] = True
    whole = []
    for place in _mask_files(index, recipes, mine):
        if isinstance(place, Reject):
            rejects.append(place)
        elif isinstance(place, int):
            whole.append(place)
        else:
            stamps[place.record_id] = np.frombuffer(place.stamp, np.uint8)

    # what is not known of them is read, one file once for all its pictures
    known = KnownHashes(index.folder.parent / FOLDER)
    contents[wanted] = known.lookup(stamps[wanted])
    contents[whole] = NO_MASK
    mine &= stamps.any(axis=1) & ~contents.any(axis=1)
    if mine.any():
        once = first_of_duplicates(mine, stamps)  # one mask may serve many pictures
        work = (place for place in _mask_files(index, recipes, once) if isinstance(place, MediaBytes))
        rejects += hash_media(index, work, int(once.sum()), known, contents, look=look, say=say)
        copy_to_duplicates(contents, mine & ~once, once, stamps)
    here = wanted[contents[wanted].any(axis=1) & stamps[wanted].any(axis=1)]
    known.close(stamps[here], contents[here])
    save_array(column, contents)
    return contents, rejects


def _mask_files(index: Index, recipes: Sequence[Recipe], wanted: np.ndarray) -> Iterator[MediaBytes | Reject | int]:
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
            yield MediaBytes(record_id, None, str(file), found.st_size, found.st_mtime_ns)
        except (Unusable, OSError) as error:
            yield Reject(index.path(index.record(record_id)), str(error))
