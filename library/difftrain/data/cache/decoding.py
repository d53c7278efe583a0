"""Making batches for an encoder in loader workers: pictures, masks and captions of a list of what is wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from difftrain.contracts import Batch, Bucket, DataFault, Record, Reject, Tokenize
from difftrain.data.cache.address import content_of, text_addresses
from difftrain.data.cache.contents import UNREADABLE
from difftrain.data.cache.cuts import Cuts, plain
from difftrain.data.cache.texts import NO_BUCKET
from difftrain.data.cache.wanted import NOBODY, Wanted
from difftrain.data.cache.work import MASKS
from difftrain.data.decoders import HOST
from difftrain.data.inspection import PASSING
from difftrain.data.masks import Masks, cut_mask, name_of
from difftrain.data.media import Unusable
from difftrain.data.samples import captions_of, cut_pixels, decode_layers

if TYPE_CHECKING:
    from difftrain.data.prepare import Data

CHANGED_SINCE = "changed since"
_SMALL = 1 << 20  # bytes
# kinds of reasons that lie in this moment or this machine, not in the picture's bytes
_PASSING = (*PASSING, UNREADABLE, CHANGED_SINCE, "unsupported format")


@dataclass(frozen=True)
class Piece:
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

    def __reduce__(self) -> tuple[Any, ...]:
        fields = [getattr(self, each.name) for each in dataclasses.fields(self)]
        if self.batch is not None:
            fields[2] = replace(
                self.batch,
                record_id=_sent(self.batch.record_id),
                occurrence=_sent(self.batch.occurrence),
                features={name: _sent(each) for name, each in self.batch.features.items()},
            )
        return _received, tuple(fields)


def _sent(value: torch.Tensor) -> Any:
    """Make a small tensor part of the message: one in shared memory of its own takes a connection, a millisecond."""
    return value.numpy() if value.nbytes < _SMALL else value


def _received(*fields: Any) -> Piece:
    piece = Piece(*fields)
    if (batch := piece.batch) is not None:
        batch.record_id, batch.occurrence = torch.as_tensor(batch.record_id), torch.as_tensor(batch.occurrence)
        batch.features = {name: torch.as_tensor(each) for name, each in batch.features.items()}
    return piece


class Decoding(Dataset[Any]):
    """Item n is batch n of a list. Picklable; batch.keys are the addresses of its rows.

    A picture whose bytes are not those that its address was made of is passed over: it has changed since.
    """

    def __init__(self, data: Data, wanted: Wanted, tokenize: Tokenize) -> None:
        self._index, self._recipes, self._wanted, self._tokenize = data.index, data.recipes, wanted, tokenize
        self._plain = plain(data.recipes)
        self._masks = wanted.name == MASKS
        self._captions = not (wanted.folder / "places.npy").is_file()
        self._cuts = Cuts(data.recipes, wanted.fingerprint, wanted.storage, masks=self._masks)
        self._bad: dict[int, str] = {}

    def pass_over(self, bad: Mapping[int, str]) -> None:
        """Leave out pictures that cannot be decoded here: record id -> reason. For workers that start from now on."""
        self._bad |= bad

    def pictures_of(self, batches: Iterable[int]) -> list[int]:
        """Return the ids of the records whose pictures some batches need, each once; none of captions."""
        if self._captions:
            return []
        rows = (self._wanted.take(self._wanted.rows(n))[0] for n in batches)
        return [
            each for each in dict.fromkeys(int(one) for some in rows for one in some["record"]) if each not in self._bad
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
        return self._wanted.batches

    def __getitem__(self, n: int) -> Piece | DataFault:
        try:
            return self._texts(n) if self._captions else self._pictures(n)
        except DataFault as fault:
            return fault  # raised by the parent, without the worker's traceback around it

    def _pictures(self, n: int) -> Piece:
        rows, made, metas = [], [], []
        rejected: dict[int, tuple[str, str]] = {}
        passed: dict[int, Reject] = {}
        decoded: dict[int, np.ndarray] = {}
        keys, every = [], self._wanted.rows(n)
        for row, entry, address in zip(every, *self._wanted.take(every), strict=True):
            record, flip = self._index.record(int(entry["record"])), bool(entry["variant"])
            if record.id in self._bad:
                passed[record.id] = Reject(self._index.path(record), self._bad[record.id])
                continue
            try:
                if record.id not in decoded:
                    decoded[record.id] = self._decoded(record, flip, address)
            except (Unusable, OSError) as error:
                if isinstance(error, Unusable) and error.kind not in _PASSING:
                    rejected[row] = (record.name, str(error))
                else:
                    reason = str(error) if isinstance(error, Unusable) else f"{UNREADABLE}: {error.strerror or error}"
                    passed[record.id] = Reject(self._index.path(record), reason)
                continue
            pixels = decoded[record.id]
            rows.append(row)
            keys.append((record.id, address))
            made.append(pixels[..., ::-1] if flip else pixels)
            metas.append({"name": record.name})
        if not rows:
            return Piece(n, (), None, [], rejected, tuple(passed.values()))
        features = {"mask" if self._masks else "pixels": torch.from_numpy(np.stack(made))}
        return Piece(
            n, tuple(rows), _batch(self._wanted.bucket(n), keys, features), metas, rejected, tuple(passed.values())
        )

    def _decoded(self, record: Record, flip: bool, address: bytes | None) -> np.ndarray:
        """Decode a picture or its mask, cut but not mirrored. Shape: (3 or 1, H, W) uint8.

        address: what its bytes must lead to; None: any. Raises: Unusable, OSError.
        """
        source = record.media.source
        recipe, place = self._plain[source], self._cuts.place(source, record.size_hw)
        masks = recipe.masks if self._masks else None
        path = _mask_of(record, masks) if masks else None
        data = path.read_bytes() if path else self._index.read(record.media)
        if address is not None and self._cuts.address(source, record.size_hw, flip, content_of(data)) != address:
            raise Unusable(CHANGED_SINCE, f"{'its mask' if path else 'it'} is not what it was when it was indexed")
        if path and masks:
            return cut_mask(masks.decode(path, data, record.size_hw), place, recipe.interpolation)
        layers = decode_layers(record, recipe, place, data)
        if self._masks:
            return cut_mask(layers[..., 3], place, recipe.interpolation)
        return cut_pixels(layers, recipe, place)

    def _texts(self, n: int) -> Piece:
        """Read and tokenise some captions. Raises DataFault where they are not those that were listed."""
        rows = self._wanted.rows(n)
        entries, addresses = self._wanted.take(rows)
        captions = self._drawn(entries)
        tokens, wanted = self._tokenize(captions), self._wanted
        found = text_addresses(tokens, wanted.inputs, wanted.fingerprint, wanted.storage)
        if found != addresses:
            raise DataFault(f"{wanted.folder}: a list of captions that were made otherwise; remove this folder")
        metas = [{"caption": caption} for caption in captions]
        keys = list(zip(entries["record"].tolist(), addresses, strict=True))
        return Piece(n, tuple(rows), _batch(NO_BUCKET, keys, tokens), metas)

    def _drawn(self, entries: np.ndarray) -> list[str]:
        """Make the captions of entries. The variants of a record are neighbours: they are made once."""
        of: dict[tuple[int, bool], list[str]] = {(NOBODY, False): [""]}
        found = []
        for entry in entries:
            asked = int(entry["record"]), bool(entry["plain"])
            if asked not in of:
                record = self._index.record(asked[0])
                recipes = self._plain if asked[1] else self._recipes
                of[asked] = captions_of(record, recipes[record.media.source])
            found.append(of[asked][int(entry["variant"])])
        return found


def _batch(bucket: Bucket, keys: Sequence[tuple[int, bytes]], features: dict[str, torch.Tensor]) -> Batch:
    """Make a batch. keys: the record and the address of each row."""
    ids = torch.tensor([record_id for record_id, _ in keys], dtype=torch.int64)
    return Batch(bucket, ids, torch.zeros_like(ids), features, {}, keys=tuple(address for _, address in keys))


def _mask_of(record: Record, masks: Masks) -> Path:
    try:
        found = masks.find(name_of(record))
    except Unusable as error:  # it was there when its address was made
        raise Unusable(UNREADABLE, str(error)) from None
    if found is None:
        raise Unusable(UNREADABLE, "its mask is gone")
    return found
