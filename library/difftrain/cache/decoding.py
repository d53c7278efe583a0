"""Batches for an encoder, made in loader workers: pictures, masks, references, captions or pairs of a manifest; a crash costs one picture."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from difftrain.cache.manifest.address import (
    MASKS,
    Cut,
    MediaTransforms,
    joined_address,
    joined_content,
    text_addresses,
    without_augmentation,
)
from difftrain.cache.manifest.captions import NO_BUCKET
from difftrain.cache.manifest.content_hash import UNREADABLE
from difftrain.cache.manifest.manifest import NO_RECORD, AddressByRecord, CacheManifest
from difftrain.cache.manifest.pictures import DROPPED, caption_and_flip
from difftrain.contracts import (
    CAPTION,
    Batch,
    Bucket,
    DataFault,
    MediaRef,
    Record,
    Reject,
    Tokenize,
    image_feature,
    reads_both,
)
from difftrain.data.index.inspection import PASSING, content_of, content_of_file
from difftrain.data.index.worker_pool import Heartbeat, PoolJob, run_jobs
from difftrain.data.loader import WorkerDied, WorkersSilent, data_loader, items_of
from difftrain.data.media.control import fit_reference
from difftrain.data.media.decoders import HOST
from difftrain.data.media.masks import Masks, cut_mask
from difftrain.data.media.media import Unusable
from difftrain.data.samples import captions_of, cut_clip, cut_pixels, decode_layers
from difftrain.data.sources.base import picture_name, read_image

if TYPE_CHECKING:
    from difftrain.data.media.crop import CropWindow
    from difftrain.data.prepare import Data
    from difftrain.data.recipe import Recipe


CHANGED_SINCE = "changed since"
_MOST_HASHED = 1 << 14
# kinds of reasons that lie in this moment or this machine, not in the picture's bytes
_RETRIED = (*PASSING, UNREADABLE, CHANGED_SINCE, "unsupported format")


@dataclass(frozen=True)
class DecodedBatch:
    """One batch of a list, made ready. rows: of the list, those that batch holds; it is None where it holds none.

    metas: what is kept beside each of these rows. rejected: other rows -> name and reason; they are as bad next time.
    passed: what could not be read now, and is not kept as bad.
    """

    number: int
    rows: tuple[int, ...]
    batch: Batch | None
    metas: list[dict[str, Any]]
    rejected: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    passed: tuple[Reject, ...] = ()


class DecodingDataset(Dataset[Any]):
    """Item n is batch n of a list. Picklable; batch.keys are the addresses of its rows.

    A picture whose bytes are not those that its address was made of is passed over: it has changed since.
    """

    def __init__(self, data: Data, manifest: CacheManifest, tokenize: Tokenize) -> None:
        self._index, self._recipes, self._manifest, self._tokenize = data.index, data.recipes, manifest, tokenize
        self._plain = without_augmentation(data.recipes)
        self._masks, self._control = manifest.name == MASKS, "control" in manifest.source
        self._numbers = range(manifest.reference, manifest.reference + manifest.num_references)
        self._features = (
            ["mask"] if self._masks else [image_feature(manifest.source, number) for number in self._numbers]
        )
        self._captions = manifest.source == CAPTION
        self._pairs = AddressByRecord(manifest.folder) if reads_both(manifest.source) else None
        kind: Cut = "mask" if self._masks else "reference" if self._control else "image"
        self._transforms = MediaTransforms(data.recipes, manifest.fingerprint, manifest.storage, kind)
        self._bad: dict[int, str] = {}
        self._hashed: dict[MediaRef, bytes] = {}  # of videos, whose clips are in several batches

    def pass_over(self, bad: Mapping[int, str]) -> None:
        """Leave out pictures that cannot be decoded here: record id -> reason. For workers that start from now on."""
        self._bad |= bad

    def pictures_of(self, batches: Iterable[int]) -> list[int]:
        """Return the ids of the records whose pictures some batches need, each once; none of captions."""
        if self._captions:
            return []
        rows = (self._manifest.take(self._manifest.rows(n))[0] for n in batches)
        return [
            index
            for index in dict.fromkeys(int(index) for some in rows for index in some["record"])
            if index not in self._bad
        ]

    def try_picture(self, record_id: int) -> None:
        """Decode a picture and forget it; what is merely wrong with it is said when its batch is made."""
        record = self._index.record(record_id)
        with suppress(Unusable, OSError):
            self._decoded(record, False, None)

    @property
    def forks(self) -> bool:
        """Tell whether workers may be forked: those that decode on a device may not."""
        return self._captions or self._masks or all(recipe.decoder == HOST for recipe in self._recipes)

    def __len__(self) -> int:
        return self._manifest.batches

    def __getitem__(self, n: int) -> DecodedBatch | DataFault:
        try:
            return self._texts(n) if self._captions else self._pictures(n)
        except DataFault as fault:
            return fault  # raised by the parent, without the worker's traceback around it

    def _pictures(self, n: int) -> DecodedBatch:
        rows, kept, metas = [], [], []
        made: list[list[np.ndarray]] = []
        rejected: dict[int, tuple[str, str]] = {}
        passed: dict[int, Reject] = {}
        decoded: dict[int, list[np.ndarray]] = {}

        # what stands in this batch, and the address of each picture alone
        keys, batch_rows = [], self._manifest.rows(n)
        entries, addresses = self._manifest.take(batch_rows)
        flips = [caption_and_flip(variant)[1] for variant in entries["variant"].tolist()]
        alone = addresses if self._pairs is None else self._pairs.addresses(entries["record"].tolist(), flips)

        # decode each picture once; its mirror image is its neighbour
        for position, (row, flip) in enumerate(zip(batch_rows, flips, strict=True)):
            record = self._index.record(int(entries["record"][position]))
            if record.id in self._bad:
                passed[record.id] = Reject(self._index.path(record), self._bad[record.id])
                continue
            try:
                if record.id not in decoded:
                    decoded[record.id] = self._decoded(record, flip, alone[position])
            except (Unusable, OSError) as error:
                if isinstance(error, Unusable) and error.kind not in _RETRIED:
                    rejected[row] = (record.name, str(error))
                else:
                    reason = str(error) if isinstance(error, Unusable) else f"{UNREADABLE}: {error.strerror or error}"
                    passed[record.id] = Reject(self._index.path(record), reason)
                continue
            rows.append(row)
            kept.append(position)
            keys.append((record.id, addresses[position]))
            made.append([pixels[..., ::-1] if flip else pixels for pixels in decoded[record.id]])
            metas.append({"name": record.name})

        # what could be decoded, with its captions where these are encoded too
        if not rows:
            return DecodedBatch(n, (), None, [], rejected, tuple(passed.values()))
        features = {
            name: torch.from_numpy(np.stack(images))
            for name, images in zip(self._features, zip(*made, strict=True), strict=True)
        }
        if self._pairs is not None:
            captions = self._drawn(entries[kept])
            metas = [{**meta, "caption": caption} for meta, caption in zip(metas, captions, strict=True)]
            features |= self._tokens(
                captions, [addresses[position] for position in kept], [alone[position] for position in kept]
            )
        return DecodedBatch(
            n, tuple(rows), _batch(self._manifest.bucket(n), keys, features), metas, rejected, tuple(passed.values())
        )

    def _decoded(self, record: Record, flip: bool, address: bytes | None) -> list[np.ndarray]:
        """Decode a picture, its mask or references of it, cut but not mirrored. Shape: (3 or 1, H, W) uint8 each.

        address: what its bytes must lead to; None: any. Raises: Unusable, OSError.
        """
        source = record.media.source
        recipe, window = self._plain[source], self._transforms.crop_window(source, record.size_hw, record.clip)
        if record.clip is not None and not self._masks:
            return [self._decoded_clip(record, flip, address, recipe, window)]
        masks = recipe.masks if self._masks else None
        path = _mask_path(record, masks) if masks else None
        places = [record.control[number] for number in self._numbers] if self._control else [record.media]
        files = [read_image(path)] if path else [self._index.read(media) for media in places]
        content = joined_content([content_of(data) for data in files])
        if (
            address is not None
            and self._transforms.address(source, record.size_hw, flip, content, record.clip) != address
        ):
            what = "its mask" if path else "its reference" if self._control else "it"
            raise Unusable(CHANGED_SINCE, f"{what} is not what it was when it was indexed")
        if self._control:
            return [
                fit_reference(record, number, data, window, recipe.interpolation, recipe.decoder, recipe.control_area)
                for number, data in zip(self._numbers, files, strict=True)
            ]
        (data,) = files
        if path and masks:
            return [cut_mask(masks.decode(path, data, record.size_hw), window, recipe.interpolation)]
        layers = decode_layers(record, recipe, window, data)
        if self._masks:
            return [cut_mask(layers[..., 3], window, recipe.interpolation)]
        return [cut_pixels(layers, recipe, window)]

    def _decoded_clip(
        self, record: Record, flip: bool, address: bytes | None, recipe: Recipe, window: CropWindow
    ) -> np.ndarray:
        """Decode a clip, cut but not mirrored. Shape: (3, F, H, W) uint8. Raises: Unusable, OSError."""
        assert record.clip is not None
        source, window = record.media.source, window._replace(flip=False)
        if address is not None:
            if record.media not in self._hashed:
                if len(self._hashed) >= _MOST_HASHED:
                    self._hashed.clear()
                self._hashed[record.media] = content_of_file(self._index.open_media(record.media))[0]
            made = self._transforms.address(source, record.size_hw, flip, self._hashed[record.media], record.clip)
            if made != address:
                raise Unusable(CHANGED_SINCE, "it is not what it was when it was indexed")
        return cut_clip(self._index.open_media(record.media), record, record.clip, recipe, window)

    def _texts(self, n: int) -> DecodedBatch:
        """Read and tokenise some captions. Raises DataFault where they are not those that were listed."""
        rows = self._manifest.rows(n)
        entries, addresses = self._manifest.take(rows)
        captions = self._drawn(entries)
        tokens = self._tokens(captions, addresses)
        metas = [{"caption": caption} for caption in captions]
        keys = list(zip(entries["record"].tolist(), addresses, strict=True))
        return DecodedBatch(n, tuple(rows), _batch(NO_BUCKET, keys, tokens), metas)

    def _tokens(
        self, captions: list[str], addresses: Sequence[bytes], pictures: Sequence[bytes | None] = ()
    ) -> dict[str, torch.Tensor]:
        """Tokenise captions. pictures: what stands beside them has these addresses alone. Raises DataFault."""
        tokens, manifest = self._tokenize(captions), self._manifest
        actual = text_addresses(tokens, manifest.inputs, manifest.fingerprint, manifest.storage)
        if pictures:
            actual = [joined_address(pair) for pair in zip(pictures, actual, strict=True)]  # type: ignore[arg-type]
        if actual != list(addresses):
            raise DataFault(f"{manifest.folder}: a list of captions made with other settings; remove this folder")
        return tokens

    def _drawn(self, entries: np.ndarray) -> list[str]:
        """Make the captions of entries. The variants of a record are neighbours: they are made once."""
        captions_by_key: dict[tuple[int, bool], list[str]] = {(NO_RECORD, False): [""]}
        captions = []
        for entry in entries:
            caption_key = int(entry["record"]), bool(entry["plain"])
            if caption_key not in captions_by_key:
                record = self._index.record(caption_key[0])
                recipes = self._plain if caption_key[1] else self._recipes
                captions_by_key[caption_key] = captions_of(record, recipes[record.media.source])
            variant = int(entry["variant"])
            if self._pairs is not None:
                number, _ = caption_and_flip(variant)
                captions.append("" if number == DROPPED else captions_by_key[caption_key][number - 1])
            else:
                captions.append(captions_by_key[caption_key][variant])
        return captions


def _batch(bucket: Bucket, keys: Sequence[tuple[int, bytes]], features: dict[str, torch.Tensor]) -> Batch:
    """Make a batch. keys: the record and the address of each row."""
    ids = torch.tensor([record_id for record_id, _ in keys], dtype=torch.int64)
    return Batch(bucket, ids, torch.zeros_like(ids), features, {}, keys=tuple(address for _, address in keys))


def _mask_path(record: Record, masks: Masks) -> Path:
    try:
        mask = masks.find(picture_name(record))
    except Unusable as error:  # it was there when its address was made
        raise Unusable(UNREADABLE, str(error)) from None
    if mask is None:
        raise Unusable(UNREADABLE, "its mask is gone")
    return mask


log = logging.getLogger("difftrain")
LIMIT_S = 60.0  # for a picture, as when data are indexed
PATIENCE_S = 150.0  # for the next batch
_TRIES = 3  # of batches that are late though none of their pictures is slow
_HANDLER = f"{__name__}:decode_each"


class BatchQueue(Iterable[int]):
    """Ask for one batch after another, as they are wanted: no rank waits while another still has a share of its own."""

    def __init__(self, todo: np.ndarray, following: Callable[[], int], stop: threading.Event) -> None:
        self._todo, self._following, self._stop = todo, following, stop
        self._again: list[int] = []
        self._out: dict[int, None] = {}  # handed out, and not back yet

    def __iter__(self) -> Iterator[int]:
        while not self._stop.is_set():
            if self._again:
                number = self._again.pop(0)
            elif (index := self._following()) < len(self._todo):
                number = int(self._todo[index])
            else:
                return
            self._out[number] = None
            yield number

    def received(self, number: int) -> None:
        """Note that a batch is made ready."""
        self._out.pop(number, None)

    def take_back(self) -> list[int]:
        """Return what is out, which is handed out once more."""
        self._again = [*self._out, *self._again]
        self._out = {}
        return list(self._again)


def decoded_batches(decoding: DecodingDataset, batch_queue: BatchQueue, workers: int) -> Iterator[DecodedBatch]:
    """Make ready what is handed out, in loader workers.

    Raises: TrainingFault where workers keep dying, or stay silent, though every picture can be decoded in time.
    """
    tries = 0
    while True:
        loader = data_loader(decoding, batch_queue, workers, decoding.forks, watched=True)
        try:
            for piece in items_of(loader, PATIENCE_S):
                tries = 0
                batch_queue.received(piece.number)
                yield piece
            return
        except (WorkerDied, WorkersSilent) as lost:
            bad = _find_bad_pictures(decoding, batch_queue.take_back())
            tries += 1
            if not bad and (isinstance(lost, WorkerDied) or tries >= _TRIES):
                raise
            decoding.pass_over(bad)
            what = str(lost).partition(". ")[0]
            log.warning(
                "%s; %d image%s rejected as too slow or crashed, the others continue", what, len(bad), _s(len(bad))
            )


def _s(count: int) -> str:
    return "s are" if count != 1 else " is"


def _find_bad_pictures(decoding: DecodingDataset, batches: Sequence[int]) -> dict[int, str]:
    """Decode the pictures of some batches one by one, watched: record id -> why it cannot be decoded."""
    job = PoolJob((decoding, decoding.pictures_of(batches)))
    rows = run_jobs([job], _HANDLER, workers=1, limit_s=LIMIT_S)
    return {record: reason for some in rows for record, reason in some if reason}


def decode_each(job: PoolJob, beat: Heartbeat) -> Iterator[tuple[int, Any]]:
    """Decode the pictures of a job, from job.start on (a handler of pool.run_jobs)."""
    decoding, records = job.payload
    for position, record in enumerate(records):
        if position < job.start:
            continue
        if position not in job.bad:
            with beat.item(position):
                decoding.try_picture(record)
        yield position, (record, job.bad.get(position))
