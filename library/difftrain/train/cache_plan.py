"""What is to be cached, how it is stored, what that takes, and whether there is room for it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from difftrain.config import TrainConfig
from difftrain.contracts import Bucket, Encoder, Family, Fault, Parts
from difftrain.data.cache.format import ALIGN, ROW
from difftrain.data.cache.storage import CHOICES, nbytes_of
from difftrain.data.cache.work import Asked, mask_encoder
from difftrain.device import host

if TYPE_CHECKING:
    from difftrain.data.prepare import Data

MASKS = "masks"
_HEAD = 2 * ALIGN  # of a payload: what its features are, and the name of the record
_INDEXED = 200  # bytes an entry takes in metadata.db, while a new one lies beside the old one
_SOURCES = (
    ("pixels", "--cache_latents", "latents", "latents_to_disk"),
    ("caption", "--cache_text_encoder_outputs", "text", "text_to_disk"),
)


@dataclass(frozen=True)
class Wish:
    """One encoder whose features are to be cached, and how they are stored. dtypes: of each feature, by torch's name."""

    name: str
    flag: str
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

    def asked(self, fingerprint: str) -> Asked:
        """Return what the list of its entries is made from."""
        return Asked(self.name, self.encoder, fingerprint, self.storage, self.batch_size)

    def entry_bytes(self, bucket: Bucket) -> int:
        """Return what an entry takes, every row of it; what a mask cuts off and compression saves is not foreseen."""
        return _HEAD + ROW.itemsize + sum(self.feature_bytes(name, bucket) for name in self.dtypes)

    def feature_bytes(self, name: str, bucket: Bucket) -> int:
        """Return what a feature takes with its scales."""
        shape, dtype = self.encoder.features[name].shape(bucket), self.dtypes[name]
        scales = 4 * (shape[0] if len(shape) > 1 else 1) if dtype == CHOICES["fp8"] else 0
        return _aligned(nbytes_of(dtype, shape)) + _aligned(scales)


def wanted(cfg: TrainConfig) -> bool:
    """Tell whether anything is to be cached."""
    return any(getattr(cfg.cache, field) for _, *_, memory, disk in _SOURCES for field in (memory, disk))


def wishes(
    cfg: TrainConfig, family: Family, parts: Parts, data: Data | None = None, *, trains: bool = True
) -> list[Wish]:
    """List what is asked for, in the order in which it is encoded. data: None leaves masks out.

    trains: these data are trained on; else what only training needs is left out.
    """
    found = []
    described = family.encoders(parts) if wanted(cfg) else {}
    for source, flag, memory, disk in _SOURCES:
        to_disk = bool(getattr(cfg.cache, disk))
        if not (to_disk or getattr(cfg.cache, memory)):
            continue
        size = cfg.model.vae_batch_size or max(cfg.batch_sizes) if source == "pixels" else cfg.cache.batch_size
        for name, encoder in described.items():
            if encoder.source == source and (trains or not parts.training_only.issuperset(encoder.modules)):
                found.append(Wish(name, flag, to_disk, encoder, dtypes_of(cfg, encoder), size))
        masks = mask_encoder(data.recipes) if source == "pixels" and data is not None else None
        if masks is not None:
            found.append(Wish(MASKS, flag, to_disk, masks, dict.fromkeys(masks.features, "uint8"), size))
    return found


def dtypes_of(cfg: TrainConfig, encoder: Encoder) -> dict[str, str]:
    """Return the dtype in which each feature is stored."""
    section = cfg.cache
    of_pictures = section.latents_dtype if encoder.modules == ("vae",) else "auto"
    general = of_pictures if encoder.source == "pixels" else section.text_dtype
    asked = {name: section.dtypes.get(name, general) for name in encoder.features}
    kept = {name: CHOICES.get(asked[name], each.dtype) for name, each in encoder.features.items()}
    return {name: "uint8" if encoder.features[name].dtype == "uint8" else dtype for name, dtype in kept.items()}


@dataclass(frozen=True)
class Need:
    """What one encoder's entries take. missing: how many are not there; bytes of all and of those."""

    wish: Wish
    entries: int
    missing: int
    total_bytes: int
    missing_bytes: int
    features: Mapping[str, float]  # bytes an entry on average

    @classmethod
    def of(cls, wish: Wish, buckets: Sequence[tuple[Bucket, int]], missing: np.ndarray) -> Need:
        """Add up over the buckets, whose entries lie one behind another in `missing`, (N,) bool."""
        total = lacking = start = 0
        features = dict.fromkeys(wish.dtypes, 0.0)
        for bucket, count in buckets:
            here = int(np.count_nonzero(missing[start : start + count]))
            each = wish.entry_bytes(bucket)
            total, lacking, start = total + count * each, lacking + here * each, start + count
            for name in features:
                features[name] += count * wish.feature_bytes(name, bucket)
        mean = {name: size / max(start, 1) for name, size in features.items()}
        return cls(wish, start, int(np.count_nonzero(missing)), total, lacking, mean)

    def sentence(self) -> str:
        """Say how large it is and what of it is missing."""
        todo = "all are there"
        if self.missing:
            there = self.entries - self.missing
            todo = f"{there:,} are there, {self.missing:,} to be encoded, {self._most}{amount(self.missing_bytes)}"
        return f"{self.size_sentence()}; {todo}"

    def size_sentence(self) -> str:
        """Say how large it is."""
        each = ", ".join(f"{name} {amount(size)} in {self.wish.dtypes[name]}" for name, size in self.features.items())
        mean = amount(self.total_bytes / max(self.entries, 1))
        return (
            f"cache of {self.wish.name}: {self.entries:,} entries of {self._most}{mean} on average ({each}), "
            f"{self._most}{amount(self.total_bytes)} in all"
        )

    @property
    def _most(self) -> str:
        """Say that less may come of it: rows that a mask cuts off and what is compressed."""
        return "at most " if self.wish.encoder.masks or "uint8" in self.wish.dtypes.values() else ""


def foreseen(wish: Wish, data: Data) -> Need:
    """Say what a cache would take, without a look at a picture or caption: equal ones are counted more than once."""
    tables = data.tables
    records = [(rows.bucket, rows.records) for rows in (*tables.training, *tables.validation)]
    if wish.encoder.source == "pixels":
        ways = 1 + any(recipe.flip for recipe in data.recipes)
        buckets = [(bucket, ways * count) for bucket, count in records]
    else:
        variants = max((recipe.num_variants or 1 for recipe in data.recipes), default=1)
        buckets = [(Bucket(0, 0), 1 + variants * sum(count for _, count in records))]
    return Need.of(wish, buckets, np.ones(sum(count for _, count in buckets), dtype=bool))


def short_of_disk(needs: Sequence[Need], folder: Path, say: Callable[[str], None]) -> Iterator[Fault]:
    """Compare what is free on a disk with what is missing. Say it."""
    if not needs:
        return
    free = shutil.disk_usage(folder).free
    size = sum(need.missing_bytes + _INDEXED * need.missing for need in needs)
    if size:
        say(f"cache: {amount(size)} are to be written to {folder}, where {amount(free)} are free")
    if size > free:
        flags = ", ".join(dict.fromkeys(f"{need.wish.flag}_to_disk" for need in needs if need.missing))
        what = f"needs {amount(size)} more below {folder}, where {amount(free)} are free"
        remedy = "make room, name another --cache_dir, or store less: --cache_latents_dtype, --cache_text_dtype"
        yield Fault(flags, what, remedy)


def short_of_memory(needs: Sequence[Need], say: Callable[[str], None]) -> Iterator[Fault]:
    """Compare what is free of this machine's memory with what is to be kept there. Say it."""
    if not needs:
        return
    free, size = host.available_bytes(), sum(need.total_bytes for need in needs)
    known = "" if free is None else f", of {amount(free)} that are free"
    say(f"cache: {amount(size)} of this machine's memory{known}")
    if free is not None and size > free:
        flags = list(dict.fromkeys(need.wish.flag for need in needs))
        what = f"needs {amount(size)} of memory, and {amount(free)} are free"
        yield Fault(", ".join(flags), what, f"{flags[0]}_to_disk keeps it in files instead")


def duration(seconds: float) -> str:
    """Write a time as people do: 42 s, 3.5 min, 7.2 h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def amount(size: float) -> str:
    """Write a number of bytes."""
    power = min(4, max(0, int(math.log2(size) // 10))) if size >= 1 else 0
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
