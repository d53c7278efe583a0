"""Addresses of features: what they were made of, hashed. Equal addresses mean equal features, whoever made them.

The parts are written as JSON, so that neither their order nor their neighbours can be confused; what differs from sample
to sample (the hash of the bytes, the tokens) comes last, so that all else is hashed once for many of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from difftrain.contracts import Clip, Draw, MediaRef, Record
from difftrain.data.media.clips import CLIP_VERSION
from difftrain.data.media.control import scaled_cut
from difftrain.data.media.crop import CropWindow, crop_window
from difftrain.data.media.media import MEDIA_VERSION

if TYPE_CHECKING:
    from difftrain.data.recipe import Recipe


BYTES = 16
VERSION = 1  # of the words that are hashed; raise it when their meaning changes
V16 = np.dtype("V16")


def media_state(cut: Sequence[Any], fingerprint: str, storage: str) -> hashlib.blake2b:
    """Return the hash of all but the bytes: update a copy with a content to get an address.

    cut: JSON values that say which pixels are made of the bytes: bucket, resized size, crop, flip, filter, decoder.
    """
    return _hash_state(b"difftrain.media", [VERSION, list(cut), fingerprint, storage])


def media_address(content: bytes, cut: Sequence[Any], fingerprint: str, storage: str) -> bytes:
    """Return the address of what an encoder makes of a picture or clip. content: see `content_of`."""
    state = media_state(cut, fingerprint, storage)
    state.update(content)
    return state.digest()


def text_address(tokens: Mapping[str, Any], fingerprint: str, storage: str) -> bytes:
    """Return the address of what an encoder makes of one tokenised caption: ids, masks, weights, bit by bit."""
    return text_addresses({name: np.asarray(token)[None] for name, token in tokens.items()}, (), fingerprint, storage)[
        0
    ]


def text_addresses(tokens: Mapping[str, Any], inputs: Sequence[str], fingerprint: str, storage: str) -> list[bytes]:
    """Return the addresses of several tokenised captions.

    tokens: arrays, or tensors on the host. inputs: those that decide the outcome, as far as they are there; none: all.
    Shapes: of tokens (B, ...).
    """
    names = sorted(name for name in tokens if name in inputs or not inputs)
    arrays = [np.ascontiguousarray(tokens[name]) for name in names]
    kinds = [[name, array.dtype.str, list(array.shape[1:])] for name, array in zip(names, arrays, strict=True)]
    state = _hash_state(b"difftrain.text", [VERSION, kinds, fingerprint, storage])
    addresses = []
    for pieces in zip(*([row.tobytes() for row in array] for array in arrays), strict=True):
        own = state.copy()
        for piece in pieces:
            own.update(piece)
        addresses.append(own.digest())
    return addresses


def joined_address(alone: Sequence[bytes]) -> bytes:
    """Return the address of what an encoder makes of several things together. alone: theirs, each by that encoder."""
    return hashlib.blake2b(b"".join(alone), digest_size=BYTES, person=b"difftrain.joined").digest()


def joined_content(contents: Sequence[bytes]) -> bytes:
    """Return what stands for the contents of several images that an encoder reads together; of one its own."""
    if len(contents) == 1:
        return contents[0]
    return hashlib.blake2b(b"".join(contents), digest_size=BYTES, person=b"difftrain.images").digest()


def as_array(addresses: Sequence[bytes]) -> np.ndarray:
    """Return addresses as an array. Shape: (N,) V16."""
    return np.frombuffer(b"".join(addresses), dtype=V16)


def _hash_state(person: bytes, words: Any) -> hashlib.blake2b:
    text = json.dumps(words, separators=(",", ":"), allow_nan=False).encode()
    state = hashlib.blake2b(digest_size=BYTES, person=person)
    state.update(len(text).to_bytes(8, "little") + text)
    return state


# --- How pictures and masks are cut for a cache: what, besides their bytes, decides the pixels that are encoded


MASKS = "masks"  # name of what is made of masks; its feature is "mask"
MASK_VERSION = 1  # raise it when any value of any mask changes
CONTROL_VERSION = 1  # the same of reference images
Cut = Literal["image", "mask", "reference"]  # what is cut
_MAX_STATES = 1 << 16


def without_augmentation(recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Return recipes as pictures are cached: without augmentation, since a use is mirrored by its variant."""
    return tuple(recipe.plain() for recipe in recipes)


def pixel_settings(recipe: Recipe) -> list[Any]:
    """Return what a recipe says of the pixels of its pictures and of their masks, as JSON values."""
    table = recipe.buckets
    sizes = [list(table.sizes), table.max_area, table.steps, table.no_upscale, *(["listed"] if table.listed else [])]
    masks = recipe.masks and (
        astuple(recipe.masks) if recipe.masks.optional or recipe.masks.default else recipe.masks.folder
    )
    return [*sizes, recipe.interpolation, recipe.alpha_mask, masks, recipe.decoder, recipe.flip]


class MediaTransforms:
    """The places where pictures are cut, their masks or references, and the addresses of what is made of them."""

    def __init__(self, recipes: Sequence[Recipe], fingerprint: str, storage: str, kind: Cut = "image") -> None:
        self.recipes, self._kind = without_augmentation(recipes), kind
        self._fingerprint, self._storage = fingerprint, storage
        self._states: dict[tuple[int, tuple[int, int], bool, Clip | None], hashlib.blake2b] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_states": {}}  # they cannot be pickled

    def address(
        self, source: int, size_hw: tuple[int, int], flip: bool, content: bytes, clip: Clip | None = None
    ) -> bytes:
        """Return the address of what is made of a picture's, clip's, mask's or reference's bytes."""
        state = self.state(source, size_hw, flip, clip).copy()
        state.update(content)
        return state.digest()

    def state(self, source: int, size_hw: tuple[int, int], flip: bool, clip: Clip | None = None) -> hashlib.blake2b:
        """Return the hash of all but the bytes. size_hw: of the picture."""
        requested = source, size_hw, flip, clip
        state = self._states.get(requested)
        if state is None:
            if len(self._states) >= _MAX_STATES:
                self._states.clear()
            cut = self._cut(self.recipes[source], self.crop_window(source, size_hw, clip), size_hw, flip)
            if clip is not None and self._kind == "image":
                cut += ["clip", CLIP_VERSION, clip.start_ms, clip.first, clip.fps]
            state = self._states[requested] = media_state(cut, self._fingerprint, self._storage)
        return state

    def crop_window(self, source: int, size_hw: tuple[int, int], clip: Clip | None = None) -> CropWindow:
        """Say where a picture or clip of a source is cut. Raises ValueError where no bucket fits."""
        record = Record(0, b"", MediaRef(source, ""), (), size_hw, clip=clip)
        return crop_window(self.recipes[source], record, Draw(0, b"", 0), 0)

    def _cut(self, recipe: Recipe, window: CropWindow, size_hw: tuple[int, int], flip: bool) -> list[Any]:
        bucket = window.fit.bucket
        shape = [[bucket.frames, bucket.height, bucket.width], list(window.fit.resized_wh), list(window.crop)]
        words = [MEDIA_VERSION, *shape, bool(flip), recipe.interpolation, recipe.decoder]
        if self._kind == "reference":
            own = [*scaled_cut(window, recipe.control_area)] if recipe.control_area else []
            return [*words, CONTROL_VERSION, "reference", list(size_hw), *own]
        if self._kind == "image":
            return [*words, "over alpha" if recipe.alpha_mask else "over white"]
        if recipe.masks is not None:
            return [*words, MASK_VERSION, "red", list(size_hw)]
        return [*words, MASK_VERSION, "alpha"]
