"""What a file of torch's must be before torch reads it: a pickle of bounded size, and records as long as their tensors.

torch reads pickles in Python, one instruction at a time, and maps records without looking at their sizes. Here the same
pickle is read by the standard library's reader in C, in which every name stands for an inert object: no code can run.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

from difftrain.io.files import open_regular

MOST_PICKLE = 1 << 24  # bytes: a model of 100,000 tensors has a tenth of that
_MOST_RECORDS, _MOST_NAMES = 1 << 20, 10_000
_LEGACY_PICKLES = 5  # before the storages of an old file: a mark, a version, the machine, the content, the keys
_BYTES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexFloat": 8, "ComplexDouble": 16, "Untyped": 1,
}  # fmt: skip


class UnreadableWeights(Exception):
    """Say that a file holds no weights that can be read safely, and why."""


class _Inert:
    """Stand for whatever a pickle names: it takes anything and does nothing."""

    named = ""

    def __init__(self, *words: Any, **more: Any) -> None:
        """Take anything."""

    def __call__(self, *words: Any, **more: Any) -> _Inert:
        return _Inert()

    def __setstate__(self, state: Any) -> None:
        """Take anything."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take anything."""

    def append(self, value: Any) -> None:
        """Take anything."""

    def extend(self, values: Any) -> None:
        """Take anything."""


class _Reader(pickle.Unpickler):
    """Note the storages that a pickle names: key -> bytes. What is no storage of a known type has no size."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.storages: dict[str, int] = {}
        self._types: dict[str, type[_Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._types:
            if len(self._types) >= _MOST_NAMES:
                raise pickle.UnpicklingError(f"it names more than {_MOST_NAMES:,} things")
            self._types[name] = type("Inert", (_Inert,), {"named": name})
        return self._types[name]

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) >= 5 and isinstance(pid[1], type) and issubclass(pid[1], _Inert):
            _, kind, key, _, count = pid[:5]
            size = _BYTES.get(kind.named.removesuffix("Storage"))
            if size is not None and isinstance(key, str) and type(count) is int and count >= 0:
                self.storages[key] = max(self.storages.get(key, 0), size * count)
        return _Inert()


def check_torch_file(path: Path) -> None:
    """Refuse a file whose pickle is too long, or is none, and one with a record shorter than its tensor.

    Raises: UnreadableWeights; OSError where it cannot be read.
    """
    with open_regular(path) as file:
        is_archive = file.read(4) == b"PK\x03\x04"  # torch's own rule
        file.seek(0)
        (_check_archive if is_archive else _check_legacy)(file)


def _check_archive(file: IO[bytes]) -> None:
    try:
        archive = zipfile.ZipFile(file)
        records = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1 or len(records) > _MOST_RECORDS:
            raise UnreadableWeights(f"is not a whole torch file: {len(pickles)} pickles in {len(records)} records")
        if records[pickles[0]].file_size > MOST_PICKLE:
            raise UnreadableWeights(
                f"holds a pickle of {records[pickles[0]].file_size:,} bytes, at most {MOST_PICKLE:,}"
            )
        content = archive.read(pickles[0])
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, RuntimeError, KeyError) as error:
        raise UnreadableWeights(f"is not a whole torch file: {error}") from None
    reader = _Reader(io.BytesIO(content))
    _read(reader)
    prefix = pickles[0].removesuffix("data.pkl")
    for key, size in reader.storages.items():
        info = records.get(f"{prefix}data/{key}")
        if info is None or info.file_size < size:
            stored = 0 if info is None else info.file_size
            raise UnreadableWeights(
                f"is not a whole torch file: record {key!r} has {stored:,} bytes, its tensor {size:,}"
            )


def _check_legacy(file: IO[bytes]) -> None:
    """Read the pickles that an old file begins with; its storages are read by torch, which sees where they end."""
    for number in range(_LEGACY_PICKLES):
        before = file.tell()
        if number and not file.peek(1):  # type: ignore[attr-defined]
            return  # one pickle alone: torch says what it is
        _read(_Reader(file))
        if file.tell() - before > MOST_PICKLE:
            raise UnreadableWeights(f"holds a pickle of {file.tell() - before:,} bytes, at most {MOST_PICKLE:,}")


def _read(reader: _Reader) -> None:
    try:
        reader.load()
    except Exception as error:  # bytes that are no pickle make its reader raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableWeights(f"is not a whole torch file: {reason}") from None
