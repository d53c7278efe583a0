"""How pictures and masks are cut for a cache: what, besides their bytes, decides the pixels that are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from difftrain.cache.manifest.address import media_state
from difftrain.contracts import Draw, MediaRef, Record
from difftrain.data.media.crop import CropWindow, crop_window
from difftrain.data.media.media import MEDIA_VERSION

if TYPE_CHECKING:
    import hashlib

    from difftrain.data.recipe import Recipe

MASKS = "masks"  # name of what is made of masks; its feature is "mask"
MASK_VERSION = 1  # raise it when any value of any mask changes
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
    """The places where pictures are cut, or their masks, and the addresses of what is made of them."""

    def __init__(self, recipes: Sequence[Recipe], fingerprint: str, storage: str, *, masks: bool) -> None:
        self.recipes, self._masks = without_augmentation(recipes), masks
        self._fingerprint, self._storage = fingerprint, storage
        self._states: dict[tuple[int, tuple[int, int], bool], hashlib.blake2b] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_states": {}}  # they cannot be pickled

    def address(self, source: int, size_hw: tuple[int, int], flip: bool, content: bytes) -> bytes:
        """Return the address of what is made of a picture's or mask's bytes."""
        state = self.state(source, size_hw, flip).copy()
        state.update(content)
        return state.digest()

    def state(self, source: int, size_hw: tuple[int, int], flip: bool) -> hashlib.blake2b:
        """Return the hash of all but the bytes. size_hw: of the picture."""
        asked = source, size_hw, flip
        state = self._states.get(asked)
        if state is None:
            if len(self._states) >= _MAX_STATES:
                self._states.clear()
            cut = self._cut(self.recipes[source], self.place(source, size_hw), size_hw, flip)
            state = self._states[asked] = media_state(cut, self._fingerprint, self._storage)
        return state

    def place(self, source: int, size_hw: tuple[int, int]) -> CropWindow:
        """Say where a picture of a source is cut. Raises ValueError where no bucket fits."""
        record = Record(0, b"", MediaRef(source, ""), (), size_hw)
        return crop_window(self.recipes[source], record, Draw(0, b"", 0), 0)

    def _cut(self, recipe: Recipe, place: CropWindow, size_hw: tuple[int, int], flip: bool) -> list[Any]:
        bucket = place.fit.bucket
        shape = [[bucket.frames, bucket.height, bucket.width], list(place.fit.resized_wh), list(place.crop)]
        words = [MEDIA_VERSION, *shape, bool(flip), recipe.interpolation, recipe.decoder]
        if not self._masks:
            return [*words, "over alpha" if recipe.alpha_mask else "over white"]
        if recipe.masks is not None:
            return [*words, MASK_VERSION, "red", list(size_hw)]
        return [*words, MASK_VERSION, "alpha"]
