"""Reading entries by address into tensors of their own. Picklable; every process opens its files for itself."""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from difftrain.contracts import Feature, TrainingFault
from difftrain.data.cache.format import (
    REJECT,
    Damaged,
    FeaturePlace,
    Stored,
    places,
    rejected,
    unpack,
)
from difftrain.data.cache.segments import Gone, Source, checked_payload, damage
from difftrain.data.cache.storage import nbytes_of, restore

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.data.cache.metadata import Row

_HEAD_BYTES = 512  # holds the table of most entries; more is read where it does not
_REMEMBERED = 1024  # rows found by `reject` and not read yet


class Entries(Protocol):
    """Say where the entry of an address lies."""

    @property
    def generation(self) -> str: ...
    def lookup(self, address: bytes) -> Row | None: ...


class Checked(Protocol):
    """Know which entries were found to be whole. generation: of the index whose numbers it has."""

    generation: str

    def has(self, number: int) -> bool: ...
    def add(self, number: int) -> None: ...


class _Step(NamedTuple):
    """How one feature gets from a payload into a tensor."""

    place: FeaturePlace
    straight: bool  # its bytes are the tensor's
    fill: int  # bytes between it and what comes before


class Reader:
    """The entries of one encoder, by address."""

    def __init__(
        self,
        source: Source,
        entries: Entries,
        features: Mapping[str, Feature],
        verified: Checked | None = None,
        *,
        cache: str = "",
    ) -> None:
        """Prepare. verified: which entries were checked since the run began; None: no checksum is looked at.

        cache: what messages call it, as it is given to `difftrain cache repair`.
        """
        self._source, self._entries, self._features, self._verified = source, entries, dict(features), verified
        self._dtypes = tuple(sorted((name, each.dtype) for name, each in features.items()))
        self._cache, self._head_bytes = cache, _HEAD_BYTES
        self._found: dict[bytes, Row] = {}
        self._settled = False

    def reject(self, address: bytes) -> str | None:
        """Return why an encoder could make nothing of what has this address; None where it could, or did not try."""
        row = self._entries.lookup(address)
        if row is None:
            return None
        if row.kind == REJECT:
            try:
                return rejected(checked_payload(self._source, row))[1]
            except Damaged as error:
                raise damage(self._cache, row, error) from error
        if len(self._found) >= _REMEMBERED:
            self._found.clear()
        self._found[address] = row  # it is most likely read next
        return None

    def read(self, addresses: Sequence[bytes]) -> dict[str, Tensor]:
        """Copy entries of one shape into tensors of their own, in the features' dtypes; rows not stored are zeros.

        Shapes: (B, ...) of each feature. Raises: TrainingFault where an entry is missing or damaged.
        """
        try:
            return self._read(self._rows(addresses))
        except Gone:
            self._look_again()
        rows = self._rows(addresses)
        try:
            return self._read(rows)
        except Gone as error:
            raise damage(self._cache, error.row, error) from error

    def _read(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        if not self._settled:
            self._settle()
        self._source.want([(row.segment, row.offset, row.length) for row in rows])
        out = _Out(len(rows), self._features)
        for number, row in enumerate(rows):
            try:
                if row.kind == REJECT:
                    _, reason = rejected(checked_payload(self._source, row))
                    raise TrainingFault(f"{self._cache}: a record is read that could not be encoded: {reason}")
                if self._verified is None or self._verified.has(row.number):
                    self._straight(row, out, number)
                else:
                    self._checked(row, out, number)
            except Gone as error:
                error.row = row
                raise
            except (Damaged, ValueError, IndexError, struct.error) as error:
                raise damage(self._cache, row, error) from error
        return out.tensors

    def _settle(self) -> None:
        """Make sure, once a process, that what was checked is numbered as the index is: it may be a newer one."""
        if self._verified is not None and self._verified.generation != self._entries.generation:
            self._verified = _Never()
        self._settled = True

    def _look_again(self) -> None:
        """Open the index anew: `difftrain cache gc` moves entries to other segments while they are read."""
        self._entries = copy.copy(self._entries)
        self._found.clear()
        self._settled = False

    def _rows(self, addresses: Sequence[bytes]) -> list[Row]:
        rows, missing = [], []
        for address in addresses:
            row = self._found.pop(address, None) or self._entries.lookup(address)
            if row is None:
                missing.append(address.hex())
            else:
                rows.append(row)
        if missing:
            raise TrainingFault(
                f"{self._cache}: {len(missing)} of {len(addresses)} entries of a batch ({', '.join(self._features)}) are not "
                f"in the cache, the first has address {missing[0]}. Start again without --trust_cache and "
                "--skip_cache_check: what is missing is encoded first"
            )
        return rows

    def _straight(self, row: Row, out: _Out, number: int) -> None:
        """Read an entry that is known to be whole: its table, then each feature to where it belongs."""
        segment, offset = row.segment, row.offset
        found, size = None, self._head_bytes
        while found is None:
            head = bytearray(min(size, row.length))
            self._source.read(segment, offset, [head])
            found = places(bytes(head))
            if found is None and size >= row.length:
                raise Damaged("its table is longer than itself")
            self._head_bytes, size = size, 2 * size
        buffers: list[Any] = []
        later: list[tuple[Stored, Tensor]] = []
        start, steps = _steps(found, self._dtypes)
        for place, straight, fill in steps:
            if fill:
                buffers.append(bytearray(fill))
            if straight:
                buffers.append(out.bytes_of(place, number))
                continue
            data: np.ndarray = np.empty(place.stop - place.start, np.uint8)
            buffers.append(data)
            scales = None
            if place.scales:
                if place.scales > place.stop:
                    buffers.append(bytearray(place.scales - place.stop))
                scales = np.empty((place.scales_stop - place.scales) // 4, np.float32)
                buffers.append(scales.data.cast("B"))
            one = Stored(place.name, place.dtype, place.shape, place.rows, data, scales, place.codec)
            later.append((one, out.tensor(place.name, place.shape)[number]))
        if start + sum(map(len, buffers)) > row.length:
            raise Damaged("its features are longer than itself")
        self._source.read(segment, offset + start, [each for each in buffers if len(each)])
        for one, tensor in later:
            restore(one, tensor)

    def _checked(self, row: Row, out: _Out, number: int) -> None:
        """Read a whole entry, look at its checksum, and remember that it is right."""
        for one in unpack(checked_payload(self._source, row)):
            if one.name in self._features:
                restore(one, out.tensor(one.name, one.shape)[number])
        assert self._verified is not None
        self._verified.add(row.number)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": {}, "_settled": False}


class _Never:
    """Nothing is known to be whole."""

    generation = ""

    def has(self, number: int) -> bool:
        return False

    def add(self, number: int) -> None:
        pass


class _Out:
    """Tensors of a batch, made when the first entry has said how large they are."""

    def __init__(self, count: int, features: Mapping[str, Feature]) -> None:
        self._count, self._features = count, features
        self._bytes: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of a feature. Raises ValueError where an entry has another shape than the first."""
        made = self.tensors.get(name)
        if made is None:
            dtype = self._features[name].dtype
            raw: np.ndarray = np.empty((self._count, nbytes_of(dtype, shape)), np.uint8)
            self._bytes[name] = raw
            made = self.tensors[name] = torch.from_numpy(raw).view(_DTYPES[dtype]).view(self._count, *shape)
        elif made.shape[1:] != shape:
            raise ValueError(f"{name} is {shape}, and {tuple(made.shape[1:])} of the first sample of this batch")
        return made

    def bytes_of(self, place: FeaturePlace, number: int) -> np.ndarray:
        """Return the bytes to fill of one sample's feature; those behind them are zeros."""
        self.tensor(place.name, place.shape)
        raw: np.ndarray = self._bytes[place.name][number]
        size = place.stop - place.start
        if size < len(raw):
            raw[size:] = 0
            raw = raw[:size]
        return raw


_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int64", "int32")
}


@lru_cache(maxsize=1024)
def _steps(found: tuple[FeaturePlace, ...], dtypes: tuple[tuple[str, str], ...]) -> tuple[int, tuple[_Step, ...]]:
    """Return where the first feature that is wanted begins in a payload, and how each of them is read. Raises ValueError."""
    wanted = dict(dtypes)
    steps: list[_Step] = []
    end = 0
    for place in sorted(found, key=lambda each: each.start):
        if place.name not in wanted:
            continue
        size = nbytes_of(place.dtype, place.shape, place.rows)
        if not place.codec and place.stop - place.start != size:
            raise ValueError(f"{place.name} has {place.stop - place.start} bytes, not {size}")
        straight = not place.codec and not place.scales and place.dtype == wanted[place.name]
        steps.append(_Step(place, straight, place.start - end if steps else 0))
        end = max(place.stop, place.scales_stop)
    if not steps:
        raise ValueError(f"it holds {', '.join(each.name for each in found)}, not {', '.join(wanted)}")
    return steps[0].place.start, tuple(steps)
