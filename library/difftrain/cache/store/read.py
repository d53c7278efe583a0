"""Reading entries by address into tensors of their own; bytes that are a tensor's already go straight into the batch."""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from difftrain.cache.store.format import (
    REJECT,
    TABLE_AT,
    Damaged,
    FeatureSpan,
    crc32c,
    feature_spans,
    rejected,
    table_end,
    unpack,
)
from difftrain.cache.store.segment import SegmentFiles, SegmentGone, SegmentSource, checked_payload, damage
from difftrain.cache.store.storage import nbytes_of, restore
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Feature, TrainingFault

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.cache.store.index import EntryRow


_NUMPY = {"bfloat16": "int16", "float8_e4m3fn": "uint8"}  # which numpy has not got: as many bytes


class CopyStep(NamedTuple):
    """How one feature gets from a payload into a tensor: its bytes are the tensor's."""

    name: str
    shape: tuple[int, ...]
    rows: int  # that are stored, of the first axis
    gap: bytearray | None  # takes what lies before it, since the feature before


class PayloadLayout(NamedTuple):
    """Entries whose features lie alike: read in one go, the table that says so with them."""

    table: bytes
    head: int  # bytes before the first feature
    size: int  # bytes to the end of the last
    steps: tuple[CopyStep, ...]


def memory_dtype(dtype: str) -> tuple[np.dtype[Any], torch.dtype | None]:
    """Return the numpy dtype that a feature's memory is made as, and what torch is to see in it."""
    same = _NUMPY.get(dtype)
    return np.dtype(same or dtype), getattr(torch, dtype) if same else None


class BatchBuffers:
    """Tensors of a batch, made when the first entry has said how large they are."""

    def __init__(self, count: int, memory_dtype: Mapping[str, tuple[np.dtype[Any], torch.dtype | None]]) -> None:
        self._count, self._made_as = count, memory_dtype
        self._arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a feature's memory. Raises ValueError where an entry has another shape than the first of its batch."""
        made = self._arrays.get(name)
        if made is None:
            dtype, seen_as = self._made_as[name]
            made = self._arrays[name] = np.empty((self._count, *shape), dtype)
            tensor = torch.from_numpy(made)
            self.tensors[name] = tensor if seen_as is None else tensor.view(seen_as)
        elif made.shape[1:] != shape:
            raise ValueError(f"{name} is {shape}, and {made.shape[1:]} of the first sample of this batch")
        return made

    def add_parts(self, buffers: list[Any], steps: Sequence[CopyStep], number: int) -> bool:
        """Add one sample's memory of each feature, in order; tell whether their shapes are those of this batch."""
        for name, shape, rows, gap in steps:
            made = self._arrays.get(name)
            if made is None:
                made = self.array(name, shape)
            elif made.shape[1:] != shape:
                return False
            part = made[number]
            if rows < shape[0]:
                part[rows:] = 0
                part = part[:rows]
            if gap is not None:
                buffers.append(gap)
            buffers.append(part)
        return True

    def clear(self) -> None:
        """Forget what was made for an entry that was of another kind."""
        self._arrays.clear()
        self.tensors.clear()


@lru_cache(maxsize=1024)
def copy_steps(
    spans: tuple[FeatureSpan, ...], dtypes: tuple[tuple[str, str], ...]
) -> tuple[int, int, tuple[CopyStep, ...]] | None:
    """Return where the first feature that is wanted begins, where the last ends, and how each is read.

    None where one is stored otherwise than it is wanted, and has to be converted. Raises: ValueError.
    """
    needed = dict(dtypes)
    here = sorted((span for span in spans if span.name in needed), key=lambda span: span.start)
    if len(here) < len(needed):
        raise ValueError(f"it holds {', '.join(span.name for span in spans)}, not {', '.join(needed)}")
    steps: list[CopyStep] = []
    end = here[0].start
    for span in here:
        if span.codec or span.scales or span.dtype != needed[span.name]:
            return None
        size = nbytes_of(span.dtype, span.shape, span.rows)
        if span.stop - span.start != size:
            raise ValueError(f"{span.name} has {span.stop - span.start} bytes, not {size}")
        gap = bytearray(span.start - end) if span.start > end else None
        steps.append(CopyStep(span.name, span.shape, span.rows, gap))
        end = span.stop
    return here[0].start, end, tuple(steps)


_HEAD_BYTES = 512  # holds the table of most entries; more is read where it does not
_REMEMBERED = 8192  # rows that were found, some 3 MB
_KINDS = 1024


class Entries(Protocol):
    """Say where the entry of an address lies."""

    @property
    def generation(self) -> str: ...
    def lookup(self, address: bytes) -> EntryRow | None: ...


class VerifiedNumbers(Protocol):
    """Know which entries were found to be whole. generation: of the index whose numbers it has."""

    generation: str

    def has(self, number: int) -> bool: ...
    def add(self, number: int) -> None: ...


class Reader:
    """The entries of one encoder, by address."""

    def __init__(
        self,
        source: SegmentSource,
        entries: Entries,
        features: Mapping[str, Feature],
        verified: VerifiedNumbers | None = None,
        *,
        cache: str = "",
    ) -> None:
        """Prepare. verified: which entries were checked since the run began; None: no checksum is looked at.

        cache: what messages call it, as it is given to `difftrain cache repair`.
        """
        self._source, self._entries, self._features, self._verified = source, entries, dict(features), verified
        self._dtypes = tuple(sorted((name, feature.dtype) for name, feature in features.items()))
        self._made_as = {name: memory_dtype(feature.dtype) for name, feature in features.items()}
        self._cache = cache
        self._files = source if isinstance(source, SegmentFiles) else None
        self._remembered: dict[bytes, EntryRow] = {}
        self._kinds: dict[
            int, PayloadLayout
        ] = {}  # by the size of an entry: entries of one size are most likely of one kind
        self._is_verified_current = False

    def reject(self, address: bytes) -> str | None:
        """Return why an encoder could make nothing of what has this address; None where it could, or did not try.

        Raises: TrainingFault where the entry that says so is damaged.
        """
        for again in (False, True):
            row = self._find(address)
            if row is None or row.kind != REJECT:
                break
            try:
                return rejected(checked_payload(self._source, row))[1]
            except Damaged as error:
                if again or not isinstance(error, SegmentGone):
                    raise damage(self._cache, row, error) from error
                self._look_again()
        return None

    def read(self, addresses: Sequence[bytes]) -> dict[str, Tensor]:
        """Copy entries of one shape into tensors of their own, in the features' dtypes; rows not stored are zeros.

        Shapes: (B, ...) of each feature. Raises: TrainingFault where an entry is missing or damaged.
        """
        try:
            return self._read(self._rows(addresses))
        except SegmentGone:
            self._look_again()
        rows = self._rows(addresses)
        try:
            return self._read(rows)
        except SegmentGone as error:
            raise damage(self._cache, error.row, error) from error

    def _read(self, rows: Sequence[EntryRow]) -> dict[str, Tensor]:
        if not self._is_verified_current:
            self._check_generation()
        if self._files is None:
            self._source.want([(row.segment, row.offset, row.length) for row in rows])
        out = BatchBuffers(len(rows), self._made_as)
        for number, row in enumerate(rows):
            try:
                check = self._verified is not None and not self._verified.has(row.number)
                kind = self._kinds.get(row.length)
                if kind is None or not self._straight(kind, row, out, number, check):
                    self._look(row, out, number, check)
                if check and self._verified is not None:
                    self._verified.add(row.number)
            except SegmentGone as error:
                error.row = row
                raise
            except (Damaged, ValueError, IndexError, struct.error) as error:
                raise damage(self._cache, row, error) from error
        return out.tensors

    def _check_generation(self) -> None:
        """Make sure, once a process, that what was checked is numbered as the index is: it may be a newer one."""
        if self._verified is not None and self._verified.generation != self._entries.generation:
            self._verified = _NoneVerified()
        self._is_verified_current = True

    def _look_again(self) -> None:
        """Open the index anew: `difftrain cache gc` moves entries to other segments while they are read."""
        self._entries = copy.copy(self._entries)
        self._remembered.clear()
        self._is_verified_current = False

    def _rows(self, addresses: Sequence[bytes]) -> list[EntryRow]:
        rows, missing = [], []
        for address in addresses:
            row = self._remembered.get(address) or self._find(address)
            if row is None:
                missing.append(address.hex())
            else:
                rows.append(row)
        if missing:
            raise TrainingFault(
                f"{self._cache}: {len(missing)} of {len(addresses)} entries of a batch ({', '.join(self._features)}) are not "
                f"in the cache, the first has address {missing[0]}. Start again without {option('cache.trust', True)} and "
                f"{option('cache.skip_check', True)}: what is missing is encoded first"
            )
        return rows

    def _find(self, address: bytes) -> EntryRow | None:
        row = self._remembered.get(address)
        if row is None and (row := self._entries.lookup(address)) is not None:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[address] = row
        return row

    def _straight(self, kind: PayloadLayout, row: EntryRow, out: BatchBuffers, number: int, check: bool) -> bool:
        """Read an entry straight into a batch, if it is of this kind; tell whether it is, and its checksum is right.

        Entries of other buckets can be of the same size: a wrong guess leaves nothing behind in the batch.
        """
        head, size = bytearray(kind.head), kind.size
        buffers: list[Any] = [head]
        if not out.add_parts(buffers, kind.steps, number):
            return False
        if check and size < row.length:
            buffers.append(bytearray(row.length - size))
            size = row.length
        if self._files is not None:
            self._files.fill(row.segment, row.offset, buffers, size)
        else:
            self._source.read(row.segment, row.offset, buffers)
        if head.startswith(kind.table, TABLE_AT) and (not check or _crc(buffers) == row.crc):
            return True
        if number == 0:
            out.clear()
        return False

    def _look(self, row: EntryRow, out: BatchBuffers, number: int, check: bool) -> None:
        """Read an entry whose kind is not known, or whose checksum is to be looked at once more."""
        if check or row.kind == REJECT:
            payload = self._unpack(row, out, number)
            self._learn(row, payload[: table_end(payload)].tobytes())
            return
        size = _HEAD_BYTES
        while True:
            head = bytearray(min(size, row.length))
            self._source.read(row.segment, row.offset, [head])
            end = table_end(head)
            if end <= len(head):
                break
            if end > row.length:
                raise Damaged("its table is longer than the payload")
            size = end
        kind = self._learn(row, bytes(head[:end]))
        if kind is None or not self._straight(kind, row, out, number, check):
            self._unpack(row, out, number)

    def _learn(self, row: EntryRow, head: bytes) -> PayloadLayout | None:
        """Remember how entries with this table are read straight; None where they have to be converted."""
        steps = copy_steps(feature_spans(head), self._dtypes)
        if steps is None:
            return None
        start, size, ordered = steps
        if size > row.length:
            raise Damaged("its features are longer than the payload")
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        kind = self._kinds[row.length] = PayloadLayout(head[TABLE_AT:], start, size, ordered)
        return kind

    def _unpack(self, row: EntryRow, out: BatchBuffers, number: int) -> np.ndarray:
        """Read a whole entry, look at its checksum, and make tensors of what it holds. Raises Damaged, TrainingFault."""
        payload = checked_payload(self._source, row)
        if row.kind == REJECT:
            raise TrainingFault(f"{self._cache}: a record is read that could not be encoded: {rejected(payload)[1]}")
        here = [feature for feature in unpack(payload) if feature.name in self._features]
        if len(here) < len(self._features):
            raise ValueError(f"it holds {', '.join(feature.name for feature in here)}, not {', '.join(self._features)}")
        for feature in here:
            out.array(feature.name, feature.shape)
            restore(feature, out.tensors[feature.name][number])
        return payload

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_remembered": {}, "_is_verified_current": False}


def _crc(buffers: Sequence[Any]) -> int:
    crc = 0
    for buffer in buffers:
        crc = crc32c(buffer, crc)
    return crc


class _NoneVerified:
    """Nothing is known to be whole."""

    generation = ""

    def has(self, number: int) -> bool:
        return False

    def add(self, number: int) -> None:
        pass
