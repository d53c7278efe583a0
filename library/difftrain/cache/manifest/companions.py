"""Hashes of what belongs to a picture: its mask and its reference images.

A mask is the picture's own alpha, or a file of its own; a reference is a file of its own, or lies with its picture in a shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from difftrain.cache.manifest.address import BYTES, joined_content
from difftrain.cache.manifest.content_hash import (
    FOLDER,
    KnownHashes,
    Log,
    MediaBytes,
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


# where the bytes lie that belong to records, (N,) bool; of a record that has none its id
Files = Callable[[np.ndarray], Iterator[MediaBytes | Reject | int]]

NO_MASK = np.ones(BYTES, np.uint8)  # content of the mask of a picture that has none, and counts as a whole


def mask_contents(
    index: Index, recipes: Sequence[Recipe], needed: np.ndarray, *, look: bool, log: Log
) -> tuple[np.ndarray, list[Reject]]:
    """Return the content of every record's mask, and which of the wanted ones have none and why.

    needed: ids, ascending, of records that have a mask. look: see whether the files are what they were; else what is
    known of them counts. Shape: (N, 16) uint8, zeros where it is not known, NO_MASK where there is none.
    """
    apart = np.array([recipe.masks is not None for recipe in recipes])[np.asarray(index.columns().source)[needed]]
    contents, rejects = np.zeros((index.count, BYTES), np.uint8), list[Reject]()
    if not apart.all():
        hashed, rejects = picture_contents(index, needed[~apart], look=look, log=log)
        contents[needed[~apart]] = hashed[needed[~apart]]
    if apart.any():
        files, more = _mask_file_contents(index, recipes, needed[apart], look, log)
        contents[needed[apart]] = files[needed[apart]]
        rejects += more
    return contents, rejects


def _mask_file_contents(
    index: Index, recipes: Sequence[Recipe], needed: np.ndarray, look: bool, log: Log
) -> tuple[np.ndarray, list[Reject]]:
    folders = json.dumps([recipe.masks and astuple(recipe.masks) for recipe in recipes]).encode()
    column = index.folder / f"masks-{hashlib.blake2b(folders, digest_size=6).hexdigest()}.npy"
    return _file_contents(index, lambda own: _mask_files(index, recipes, own), needed, column, "mask", look, log)


def control_contents(
    index: Index, needed: np.ndarray, number: int, *, look: bool, log: Log
) -> tuple[np.ndarray, list[Reject]]:
    """Return the content of every record's reference `number`, and which of the wanted ones have none and why.

    needed: ids, ascending. look: see whether the files are what they were; else what is known of them counts.
    Shape: (N, 16) uint8, zeros where it is not known.
    """
    column = index.folder / f"control-{number}.npy"
    return _file_contents(index, lambda own: _references(index, number, own), needed, column, "reference", look, log)


def reference_contents(
    index: Index, needed: np.ndarray, numbers: Sequence[int], *, look: bool, log: Log
) -> tuple[np.ndarray, list[Reject]]:
    """Return the content of several references of every record as one, which is that of a single one; see control_contents."""
    contents, rejects = control_contents(index, needed, numbers[0], look=look, log=log)
    if len(numbers) == 1:
        return contents, rejects
    columns = [contents]
    for number in numbers[1:]:
        more, bad = control_contents(index, needed, number, look=look, log=log)
        columns.append(more)
        rejects = rejects + bad
    joined = np.zeros_like(contents)
    known = np.all([column.any(axis=1) for column in columns], axis=0)
    for record_id in needed[known[needed]]:
        joined[record_id] = np.frombuffer(joined_content([column[record_id].tobytes() for column in columns]), np.uint8)
    return joined, rejects


def _file_contents(
    index: Index, files: Files, needed: np.ndarray, column: Path, what: str, look: bool, log: Log
) -> tuple[np.ndarray, list[Reject]]:
    """Hash files that belong to records. column: where hashes are kept; what: a file is called."""
    if not look:
        with contextlib.suppress(OSError, ValueError):
            saved: np.ndarray = np.load(column)
            if saved.shape == (index.count, BYTES):
                left = needed[~saved[needed].any(axis=1)]
                reason = f"unreadable: the content of its {what} is unknown, and nothing is read now"
                return saved, [Reject(index.path(index.record(int(record_id))), reason) for record_id in left]

    # the file of each record, by its stamp
    contents, stamps, rejects = np.zeros((index.count, BYTES), np.uint8), np.zeros((index.count, BYTES), np.uint8), []
    own = np.zeros(index.count, dtype=bool)
    own[needed] = True
    complete = []
    for media in files(own):
        if isinstance(media, Reject):
            rejects.append(media)
        elif isinstance(media, int):
            complete.append(media)
        else:
            stamps[media.record_id] = np.frombuffer(media.stamp, np.uint8)

    # what is not known of them is read, one file once for all its pictures
    known = KnownHashes(index.folder.parent / FOLDER)
    contents[needed] = known.lookup(stamps[needed])
    contents[complete] = NO_MASK
    own &= stamps.any(axis=1) & ~contents.any(axis=1)
    if own.any():
        once = first_of_duplicates(own, stamps)  # one file may serve many pictures
        work = (media for media in files(once) if isinstance(media, MediaBytes))
        rejects += hash_media(index, work, int(once.sum()), known, contents, look=look, log=log)
        copy_to_duplicates(contents, own & ~once, once, stamps)
    here = needed[contents[needed].any(axis=1) & stamps[needed].any(axis=1)]
    known.close(stamps[here], contents[here])
    save_array(column, contents)
    return contents, rejects


def _mask_files(index: Index, recipes: Sequence[Recipe], needed: np.ndarray) -> Iterator[MediaBytes | Reject | int]:
    """Iterate over the mask files of records; of one that counts as a whole, its id. Shape: wanted (N,) bool."""
    rows = np.asarray(index.columns().row)
    ids = np.zeros(int(rows.max(initial=0)) + 1, dtype=np.uint32)
    ids[rows] = np.arange(len(rows), dtype=np.uint32)
    sources = [info.ordinal for info in index.sources if recipes[info.ordinal].masks]
    for row, source, path, member in index.places(sources):
        record_id = int(ids[row])
        masks = recipes[source].masks
        if not needed[record_id] or masks is None:
            continue
        try:
            file = masks.find(path if member is None else member)
            if file is None:
                yield record_id
                continue
            stat = file.stat()
            yield MediaBytes(record_id, None, str(file), stat.st_size, stat.st_mtime_ns)
        except (Unusable, OSError) as error:
            yield Reject(index.path(index.record(record_id)), str(error))


def _references(index: Index, number: int, needed: np.ndarray) -> Iterator[MediaBytes | Reject | int]:
    """Iterate over where the references of records lie: in files of their own, or in shards. Shape: needed (N,) bool."""
    rows = np.asarray(index.columns().row)
    ids = np.zeros(int(rows.max(initial=0)) + 1, dtype=np.uint32)
    ids[rows] = np.arange(len(rows), dtype=np.uint32)
    for row, media, size, mtime_ns in index.references(number):
        record_id = int(ids[row])
        if not needed[record_id]:
            continue
        file = Path(index.sources[media.source].root) / media.path  # an absolute path stays what it is
        if media.length:
            yield MediaBytes(record_id, media, str(file), size, mtime_ns)
            continue
        try:
            stat = file.stat()
            yield MediaBytes(record_id, None, str(file), stat.st_size, stat.st_mtime_ns)
        except OSError as error:
            yield Reject(index.path(index.record(record_id)), f"unreadable: the reference {file}: {error.strerror}")
