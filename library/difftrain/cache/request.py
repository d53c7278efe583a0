"""What a run asks of the cache: which encoders, how their features are stored, what that takes, and whether there is room."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from difftrain.cache.manifest.address import MASK_VERSION, MASKS
from difftrain.cache.manifest.captions import caption_settings, tokenizer_identity, write_captions
from difftrain.cache.manifest.content_hash import Log
from difftrain.cache.manifest.manifest import CacheManifest, ManifestRequest, ManifestWriter
from difftrain.cache.manifest.pictures import (
    PictureEntries,
    bucket_by_record,
    caption_request,
    write_pairs,
    write_pictures,
)
from difftrain.cache.store.format import ALIGN, ROW
from difftrain.cache.store.storage import CHOICES, nbytes_of
from difftrain.config import TrainConfig
from difftrain.config.spellings.spelling import option
from difftrain.contracts import (
    CAPTION,
    PIXELS,
    Bucket,
    ConfigFault,
    Encoder,
    Family,
    Fault,
    Feature,
    Parts,
    Tokenize,
    reads_both,
)
from difftrain.data.captions import may_drop
from difftrain.device import host

if TYPE_CHECKING:
    from difftrain.data.prepare import Data
    from difftrain.data.recipe import Recipe


_HEAD = 2 * ALIGN  # of a payload: what its features are, and the name of the record
_INDEXED = 200  # bytes an entry takes in metadata.db, while a new one lies beside the old one
# by whether captions are read: what reads them is a text encoder, also where it sees the picture
_SOURCES = (
    (False, "latents", "latents_to_disk"),
    (True, "text", "text_to_disk"),
)


@dataclass(frozen=True)
class CacheRequest:
    """One encoder whose features are to be cached, and how they are stored. dtypes: of each feature, by torch's name."""

    name: str
    field: str
    to_disk: bool
    encoder: Encoder
    dtypes: Mapping[str, str]
    batch_size: int

    @property
    def storage(self) -> str:
        """Name all of the way of storing that addresses depend on: dtypes, and by which masks rows are cut off."""
        masks = self.encoder.masks
        return ",".join(
            f"{name}={dtype}" + (f" up to {masks[name]}" if name in masks else "")
            for name, dtype in sorted(self.dtypes.items())
        )

    def manifest_request(self, fingerprint: str) -> ManifestRequest:
        """Return what the list of its entries is made from."""
        return ManifestRequest(self.name, self.encoder, fingerprint, self.storage, self.batch_size)

    def entry_bytes(self, bucket: Bucket) -> int:
        """Return what an entry takes, every row of it; what a mask cuts off and compression saves is not foreseen."""
        return _HEAD + ROW.itemsize + sum(self.feature_bytes(name, bucket) for name in self.dtypes)

    def feature_bytes(self, name: str, bucket: Bucket) -> int:
        """Return what a feature takes with its scales."""
        shape, dtype = self.encoder.features[name].shape(bucket), self.dtypes[name]
        scales = 4 * (shape[0] if len(shape) > 1 else 1) if dtype == CHOICES["fp8"] else 0
        return _aligned(nbytes_of(dtype, shape)) + _aligned(scales)


def caches_anything(cfg: TrainConfig) -> bool:
    """Tell whether anything is to be cached."""
    return any(getattr(cfg.cache, field) for _, memory, disk in _SOURCES for field in (memory, disk))


def cache_requests(
    cfg: TrainConfig, family: Family, parts: Parts, data: Data | None = None, *, trains: bool = True
) -> list[CacheRequest]:
    """List what is asked for, in the order in which it is encoded. data: None leaves masks out.

    trains: these data are trained on; else what only training needs is left out. Raises: ConfigFault where an encoder
    of captions sees pictures that are cut or coloured anew at every use.
    """
    requests = []
    described = encoders_of(family, parts, trains=trains) if caches_anything(cfg) else {}

    # --- what reads pictures, then what reads captions
    for reads_captions, memory, disk in _SOURCES:
        to_disk = bool(getattr(cfg.cache, disk))
        if not (to_disk or getattr(cfg.cache, memory)):
            continue
        size = cfg.cache.batch_size if reads_captions else cfg.model.vae_batch_size or max(cfg.batch_sizes)

        # --- encoders
        for name, encoder in described.items():
            if ("caption" in encoder.source) == reads_captions:
                if reads_both(encoder.source) and data is not None:
                    _refuse_random_crops(name, f"cache.{memory}", data)
                requests.append(
                    CacheRequest(name, f"cache.{memory}", to_disk, encoder, storage_dtypes(cfg, encoder), size)
                )

        # --- masks are cached beside pictures
        masks = mask_encoder(data.recipes) if not reads_captions and data is not None else None
        if masks is not None:
            requests.append(
                CacheRequest(MASKS, f"cache.{memory}", to_disk, masks, dict.fromkeys(masks.features, "uint8"), size)
            )
    return requests


def encoders_of(family: Family, parts: Parts, *, trains: bool) -> dict[str, Encoder]:
    """Return the encoders that data are for. trains: they are trained on; else those of training alone are left out."""
    every = family.encoders(parts)
    return {
        name: encoder
        for name, encoder in every.items()
        if trains or not parts.training_only.issuperset(encoder.modules)
    }


def _refuse_random_crops(name: str, field: str, data: Data) -> None:
    """Refuse to keep what an encoder sees of pictures that are not the same at every use. Raises ConfigFault."""
    each_use = {
        option("data.random_crop", True): any(recipe.random_crop for recipe in data.recipes),
        option("data.color_aug", True): any(recipe.color_aug for recipe in data.recipes),
        option("data.face_crop_range"): any(recipe.face_crop_range for recipe in data.recipes),
    }
    what = (
        f"contradicts {option(field, True)}: {name} reads the image with its caption, and every use has another image"
    )
    if faults := [Fault(flag, what, "give one of them") for flag, is_on in each_use.items() if is_on]:
        raise ConfigFault(faults)


def storage_dtypes(cfg: TrainConfig, encoder: Encoder) -> dict[str, str]:
    """Return the dtype in which each feature is stored."""
    section = cfg.cache
    of_pictures = section.latents_dtype if encoder.modules == ("vae",) else "auto"
    general = section.text_dtype if "caption" in encoder.source else of_pictures
    requested = {name: section.dtypes.get(name, general) for name in encoder.features}
    kept = {name: CHOICES.get(requested[name], feature.dtype) for name, feature in encoder.features.items()}
    return {name: "uint8" if encoder.features[name].dtype == "uint8" else dtype for name, dtype in kept.items()}


@dataclass(frozen=True)
class StorageEstimate:
    """What one encoder's entries take. missing: how many are not there; bytes of all and of those."""

    request: CacheRequest
    entries: int
    missing: int
    total_bytes: int
    missing_bytes: int
    features: Mapping[str, float]  # bytes an entry on average

    @classmethod
    def of(cls, request: CacheRequest, buckets: Sequence[tuple[Bucket, int]], missing: np.ndarray) -> StorageEstimate:
        """Add up over the buckets, whose entries lie one behind another in `missing`, (N,) bool."""
        total = lacking = start = 0
        features = dict.fromkeys(request.dtypes, 0.0)
        for bucket, count in buckets:
            here = int(np.count_nonzero(missing[start : start + count]))
            entry_bytes = request.entry_bytes(bucket)
            total, lacking, start = total + count * entry_bytes, lacking + here * entry_bytes, start + count
            for name in features:
                features[name] += count * request.feature_bytes(name, bucket)
        mean = {name: size / max(start, 1) for name, size in features.items()}
        return cls(request, start, int(np.count_nonzero(missing)), total, lacking, mean)

    def sentence(self) -> str:
        """Say how large it is and what of it is missing."""
        todo = "all are present"
        if self.missing:
            present = self.entries - self.missing
            todo = (
                f"{present:,} are present, {self.missing:,} to be encoded, {self._most}{bytes_text(self.missing_bytes)}"
            )
        return f"{self.size_sentence()}; {todo}"

    def size_sentence(self) -> str:
        """Say how large it is."""
        per_entry = ", ".join(
            f"{name} {bytes_text(size)} in {self.request.dtypes[name]}" for name, size in self.features.items()
        )
        mean = bytes_text(self.total_bytes / max(self.entries, 1))
        return (
            f"cache of {self.request.name}: {self.entries:,} entries of {self._most}{mean} on average ({per_entry}), "
            f"{self._most}{bytes_text(self.total_bytes)} in all"
        )

    @property
    def _most(self) -> str:
        """Say that less may come of it: rows that a mask cuts off and what is compressed."""
        return "at most " if self.request.encoder.masks or "uint8" in self.request.dtypes.values() else ""


def estimate_storage(request: CacheRequest, data: Data) -> StorageEstimate:
    """Say what a cache would take, without a look at a picture or caption: equal ones are counted more than once."""
    tables = data.tables
    records = [(rows.bucket, rows.records) for rows in (*tables.training, *tables.validation)]
    cuts = 1 + any(recipe.flip for recipe in data.recipes)
    variants = max((recipe.num_variants or 1 for recipe in data.recipes), default=1)
    if request.encoder.source == CAPTION:
        buckets = [(Bucket(0, 0), 1 + variants * sum(count for _, count in records))]
    else:
        drops = any(may_drop(recipe.captions) for recipe in data.recipes)
        ways = cuts * (variants + drops) if reads_both(request.encoder.source) else cuts
        buckets = [(bucket, ways * count) for bucket, count in records]
    return StorageEstimate.of(request, buckets, np.ones(sum(count for _, count in buckets), dtype=bool))


def disk_shortage(estimates: Sequence[StorageEstimate], folder: Path, log: Callable[[str], None]) -> Iterator[Fault]:
    """Compare what is free on a disk with what is missing. Say it."""
    if not estimates:
        return
    free = shutil.disk_usage(folder).free
    size = sum(estimate.missing_bytes + _INDEXED * estimate.missing for estimate in estimates)
    if size:
        log(f"cache: {bytes_text(size)} are to be written to {folder}, where {bytes_text(free)} are free")
    if size > free:
        flags = ", ".join(
            dict.fromkeys(
                option(f"{estimate.request.field}_to_disk", True) for estimate in estimates if estimate.missing
            )
        )
        what = f"needs {bytes_text(size)} more below {folder}, where {bytes_text(free)} are free"
        remedy = f"free some space, name another {option('data.cache_dir')}, or store less: {option('cache.latents_dtype')}, {option('cache.text_dtype')}"
        yield Fault(flags, what, remedy)


def memory_shortage(estimates: Sequence[StorageEstimate], log: Callable[[str], None]) -> Iterator[Fault]:
    """Compare what is free of this machine's memory with what is to be kept there. Say it."""
    if not estimates:
        return
    free, size = host.available_bytes(), sum(estimate.total_bytes for estimate in estimates)
    known = "" if free is None else f", of {bytes_text(free)} that are free"
    log(f"cache: {bytes_text(size)} of this machine's memory{known}")
    if free is not None and size > free:
        fields = list(dict.fromkeys(estimate.request.field for estimate in estimates))
        what = f"needs {bytes_text(size)} of memory, and {bytes_text(free)} are free"
        names = ", ".join(option(field, True) for field in fields)
        yield Fault(names, what, f"{option(f'{fields[0]}_to_disk', True)} keeps it in files instead")


def duration_text(seconds: float) -> str:
    """Write a time as people do: 42 s, 3.5 min, 7.2 h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def bytes_text(size: float) -> str:
    """Write a number of bytes."""
    power = min(4, max(0, int(math.log2(size) // 10))) if size >= 1 else 0
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


# --- What is to be encoded: the pictures of every bucket, their masks, every caption that training can draw, and pairs


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
    data: Data, requests: Sequence[ManifestRequest], tokenize: Tokenize, *, look: bool = True, log: Log = print
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
        pictures = PictureEntries.of(data, request, look=look, log=log)
        is_pair = reads_both(request.encoder.source)
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
        write_captions(data, ids, absent, tokenize, log)

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
