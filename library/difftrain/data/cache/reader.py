"""Reading entries by address into tensors of their own. Picklable; every process opens its files for itself."""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.contracts import Feature, TrainingFault
from difftrain.data.cache.format import REJECT, TABLE_AT, Damaged, places, rejected, table_end, unpack
from difftrain.data.cache.segments import Gone, Segments, Source, checked_payload, damage
from difftrain.data.cache.storage import restore
from difftrain.data.cache.straight import Filling, Kind, made_as, steps_of

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.data.cache.metadata import Row

_HEAD_BYTES = 512  # holds the table of most entries; more is read where it does not
_REMEMBERED = 8192  # rows that were found, some 3 MB
_KINDS = 1024


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
        self._made_as = {name: made_as(each.dtype) for name, each in features.items()}
        self._cache = cache
        self._files = source if isinstance(source, Segments) else None
        self._found: dict[bytes, Row] = {}
        self._kinds: dict[int, Kind] = {}  # by the size of an entry: entries of one size are most likely of one kind
        self._settled = False

    def reject(self, address: bytes) -> str | None:
        """Return why an encoder could make nothing of what has this address; None where it could, or did not try.

        Raises: TrainingFault where the entry that says so is damaged.
        """
        row = self._find(address)
        if row is None or row.kind != REJECT:
            return None
        try:
            return rejected(checked_payload(self._source, row))[1]
        except Gone:
            self._look_again()
        except Damaged as error:
            raise damage(self._cache, row, error) from error
        row = self._find(address)
        try:
            return None if row is None else rejected(checked_payload(self._source, row))[1]
        except Damaged as error:
            raise damage(self._cache, row, error) from error

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
        if self._files is None:
            self._source.want([(row.segment, row.offset, row.length) for row in rows])
        out = Filling(len(rows), self._made_as)
        for number, row in enumerate(rows):
            try:
                if self._verified is None or self._verified.has(row.number):
                    kind = self._kinds.get(row.length)
                    if kind is None or not self._straight(kind, row, out, number):
                        self._look(row, out, number)
                else:
                    self._unpack(row, out, number)
                    self._verified.add(row.number)
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
            row = self._found.get(address) or self._find(address)
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

    def _find(self, address: bytes) -> Row | None:
        row = self._found.get(address)
        if row is None and (row := self._entries.lookup(address)) is not None:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            self._found[address] = row
        return row

    def _straight(self, kind: Kind, row: Row, out: Filling, number: int) -> bool:
        """Read an entry that is known to be whole straight into a batch, if it is of this kind; tell whether it is.

        Entries of other buckets can be of the same size: a wrong guess leaves nothing behind in the batch.
        """
        head = bytearray(kind.head)
        buffers: list[Any] = [head]
        if not out.add_parts(buffers, kind.steps, number):
            return False
        if self._files is not None:
            self._files.fill(row.segment, row.offset, buffers, kind.size)
        else:
            self._source.read(row.segment, row.offset, buffers)
        if head.startswith(kind.table, TABLE_AT):
            return True
        if number == 0:
            out.clear()
        return False

    def _look(self, row: Row, out: Filling, number: int) -> None:
        """Read an entry that is known to be whole, of whatever kind it is: its table first."""
        if row.kind == REJECT:
            self._unpack(row, out, number)
        size = _HEAD_BYTES
        while True:
            head = bytearray(min(size, row.length))
            self._source.read(row.segment, row.offset, [head])
            found = places(bytes(head))
            if found is not None or len(head) == row.length:
                break
            size *= 2
        if found is None:
            raise Damaged("its table is longer than itself")
        steps = steps_of(found, self._dtypes)
        if steps is None:
            self._unpack(row, out, number)
            return
        start, size, ordered = steps
        if size > row.length:
            raise Damaged("its features are longer than itself")
        kind = Kind(bytes(head[TABLE_AT : table_end(head)]), start, size, ordered)
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._kinds[row.length] = kind
        for name, shape, _, _ in ordered:
            out.array(name, shape)  # which names an entry of another shape than the batch's
        if not self._straight(kind, row, out, number):
            raise ValueError("its features are not shaped as those of the first sample of this batch")

    def _unpack(self, row: Row, out: Filling, number: int) -> None:
        """Read a whole entry, look at its checksum, and make tensors of what it holds. Raises Damaged, TrainingFault."""
        payload = checked_payload(self._source, row)
        if row.kind == REJECT:
            raise TrainingFault(f"{self._cache}: a record is read that could not be encoded: {rejected(payload)[1]}")
        for one in unpack(payload):
            if one.name in self._features:
                out.array(one.name, one.shape)
                restore(one, out.tensors[one.name][number])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": {}, "_settled": False}


class _Never:
    """Nothing is known to be whole."""

    generation = ""

    def has(self, number: int) -> bool:
        return False

    def add(self, number: int) -> None:
        pass
