"""Images of a dataset that look nearly the same: resized, recompressed or slightly cropped copies.

Each image becomes 128 bits: whether a shrunken copy grows brighter from one pixel to the next, along rows and along
columns (the difference hash of N. Krawetz, "Kind of like that", 2013, in both directions). A few bits apart is the same
scene. Reading costs some milliseconds an image, so that large datasets are left out.
"""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

import numpy as np
from PIL import Image

from difftrain.data.media.media import FORMATS
from difftrain.report.page import jpeg_address
from difftrain.train.inspect.facts import Look

MOST_IMAGES = 2_000  # of a dataset that is looked through: 10 to 40 s where images have a megapixel
SIDE = 8
CLOSE = 10  # of 128 bits; unrelated images are about 64 apart
FLAT = 4.0  # grey levels of deviation: below there is nothing to compare
MOST_GROUPS, MOST_SHOWN = 24, 6
TRIES = ((112, 72), (88, 60), (64, 50))
BYTES = 3_000  # of one small image, so that all groups together stay below half a megabyte


def similar(look: Look) -> dict[str, Any]:
    """Group images that look nearly the same, the largest groups first, with small pictures of each."""
    count = look.data.index.count
    if count > MOST_IMAGES:
        return {"looked_for": False, "limit": MOST_IMAGES, "images": 0, "groups": 0, "first": []}
    known = {i: bits for i in range(count) if (bits := _hash_of(look, i)) is not None}
    groups = grouped(known)
    return {
        "looked_for": True,
        "limit": MOST_IMAGES,
        "images": sum(map(len, groups)),
        "groups": len(groups),
        "first": [_described(look, group) for group in groups[:MOST_GROUPS]],
    }


def grouped(known: dict[int, np.ndarray]) -> list[list[int]]:
    """Join ids whose hashes are close, and those close to them; ids in order, large groups first."""
    if not known:
        return []
    ids = sorted(known)
    signs = np.stack([known[i] for i in ids]).astype(np.float32) * 2 - 1
    distances = (signs.shape[1] - signs @ signs.T) / 2

    parent = list(range(len(ids)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in np.argwhere(np.triu(distances <= CLOSE, 1)).tolist():
        parent[root(b)] = root(a)
    members: dict[int, list[int]] = defaultdict(list)
    for position, record_id in enumerate(ids):
        members[root(position)].append(record_id)
    return sorted((group for group in members.values() if len(group) > 1), key=lambda group: (-len(group), group))


def hash_bits(image: Image.Image) -> np.ndarray | None:
    """Return the 128 bits of an image, bool; None where it is too flat to be told from others."""
    image.draft("L", (8 * SIDE, 8 * SIDE))  # a JPEG is decoded small
    grey = np.asarray(image.convert("L").resize((SIDE + 1, SIDE + 1), Image.Resampling.BOX), dtype=np.int16)
    if grey.std() < FLAT:
        return None
    return np.concatenate([np.diff(grey[:SIDE], axis=1).ravel() > 0, np.diff(grey[:, :SIDE], axis=0).ravel() > 0])


def _hash_of(look: Look, record_id: int) -> np.ndarray | None:
    try:
        with Image.open(
            io.BytesIO(look.data.index.read(look.data.index.record(record_id).media)), formats=FORMATS
        ) as image:
            return hash_bits(image)
    except Exception:  # no image, gone, or cut short: decoders of foreign bytes raise anything
        return None


def _described(look: Look, group: list[int]) -> dict[str, Any]:
    records = [look.data.index.record(i) for i in group[:MOST_SHOWN]]
    shown = []
    for record in records:
        size = f"{record.size_hw[1]} × {record.size_hw[0]} px"
        one: dict[str, Any] = {"name": record.name, "size": size, "caption": next(iter(record.captions), "")[:200]}
        try:
            with Image.open(io.BytesIO(look.data.index.read(record.media)), formats=FORMATS) as image:
                image.draft("RGB", (2 * TRIES[0][0],) * 2)
                one["image"] = jpeg_address(image.convert("RGB"), TRIES, BYTES)
        except Exception:  # as above
            one["image"] = None
        shown.append(one)
    return {"images": len(group), "shown": shown}
