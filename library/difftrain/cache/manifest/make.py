"""What is to be encoded: the pictures of every bucket, their masks, every caption that training can draw, and pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from difftrain.cache.manifest.captions import caption_settings, tokenizer_identity, write_captions
from difftrain.cache.manifest.content_hash import Say
from difftrain.cache.manifest.manifest import CacheManifest, ManifestRequest, ManifestWriter
from difftrain.cache.manifest.pictures import (
    PictureEntries,
    bucket_by_record,
    caption_request,
    write_pairs,
    write_pictures,
)
from difftrain.cache.manifest.transforms import MASK_VERSION
from difftrain.contracts import CAPTION, PAIR, PIXELS, Encoder, Feature, Tokenize

if TYPE_CHECKING:
    from difftrain.data.prepare import Data
    from difftrain.data.recipe import Recipe


def mask_encoder(recipes: Sequence[Recipe]) -> Encoder | None:
    """Return what makes masks of the loss: workers do, nothing is left to a device. None where no picture has one."""
    if not any(recipe.has_masks for recipe in recipes):
        return None
    return Encoder(
        source=PIXELS,
        features={"mask": Feature(1, factor=1, dtype="uint8")},
        modules=(),
        settings="",
        encode=lambda batch: {"mask": batch.features["mask"]},
        fingerprint=lambda: f"masks {MASK_VERSION}",
    )


def build_manifests(
    data: Data, requests: Sequence[ManifestRequest], tokenize: Tokenize, *, look: bool = True, say: Say = print
) -> dict[str, Path]:
    """List what is wanted of each encoder, and return the folder of each list (see CacheManifest). One process a machine.

    look: hash pictures and masks whose content is not known; else they are left out, and CacheManifest.passed names them.
    Raises: TrainingFault where the disk is full.
    """
    settings = _caption_settings(data, tokenize)
    of_pictures: list[ManifestWriter] = []
    of_captions: list[ManifestWriter] = []
    pairs: list[_PairJob] = []

    # pictures and masks; pairs wait for their captions
    for request in requests:
        if request.encoder.source == CAPTION:
            of_captions.append(ManifestWriter(data.index, request, settings))
            continue
        pictures = PictureEntries.of(data, request, look=look, say=say)
        is_pair = request.encoder.source == PAIR
        writer = ManifestWriter(data.index, request, [*pictures.settings, *(settings if is_pair else ())])
        of_pictures.append(writer)
        if writer.exists:
            continue
        if is_pair:
            pairs.append(_PairJob(writer, pictures, ManifestWriter(data.index, caption_request(request), settings)))
        else:
            write_pictures(writer, pictures)

    # captions, tokenised once for all encoders
    captions = [*of_captions, *(pair.captions for pair in pairs)]
    if absent := [writer for writer in captions if not writer.exists]:
        ids = np.flatnonzero(bucket_by_record(data.tables, data.index.count)[1] >= 0)
        write_captions(data, ids, absent, tokenize, say)

    # pairs of both
    for pair in pairs:
        write_pairs(data, pair.writer, pair.pictures, CacheManifest(pair.captions.folder))
    return {writer.request.name: writer.folder for writer in (*of_pictures, *of_captions)}


class _PairJob(NamedTuple):
    """A manifest of pairs that is to be written, and what it is made of."""

    writer: ManifestWriter
    pictures: PictureEntries
    captions: ManifestWriter


def _caption_settings(data: Data, tokenize: Tokenize) -> list[Any]:
    """Return all that decides the captions and their tokens."""
    return [
        data.tables.folder.name,
        [caption_settings(recipe) for recipe in data.recipes],
        tokenizer_identity(tokenize),
    ]
