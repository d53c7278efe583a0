"""Files of weights, written one tensor at a time: a model of 3.5 billion parameters needs no second copy in memory."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch

from difftrain.io.files import atomic_write

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
MODELSPEC = "modelspec.sai_model_spec"  # a file that is described is hashed, too
# metadata -> (a letter, length): ModelSpec's hash, and those that kohya's tools write and A1111 and Civitai tell files by
_HASHES = {"modelspec.hash_sha256": ("0", 66), "sshs_model_hash": ("0", 64), "sshs_legacy_hash": ("0", 8)}
_LEGACY_AT, _LEGACY_BYTES, _CHUNK = 1 << 20, 1 << 16, 1 << 22


class WeightWriter(Protocol):
    """Take tensors in any order; whole tensors, or one of `count` equal stacks on dim 0."""

    def write(self, key: str, value: Tensor, index: int = 0, count: int = 1) -> None: ...


@contextmanager
def safetensors_writer(path: Path, shapes: Shapes, metadata: dict[str, str] | None = None) -> Iterator[WeightWriter]:
    """Write a safetensors file whose keys, dtypes and shapes are known beforehand; whole or absent.

    Raises ValueError on leaving where a tensor is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        writer = _SafetensorsWriter(file, shapes, metadata or {})
        yield writer
        writer.finish()


@contextmanager
def torch_writer(path: Path, shapes: Shapes) -> Iterator[WeightWriter]:
    """Write what torch.save would for {key: tensor}, tensor by tensor; whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, buffering=0) as file:
        writer = _TorchWriter(file, shapes)
        try:
            yield writer
            writer.finish()
        finally:
            writer.close()


class _SafetensorsWriter:
    def __init__(self, file: IO[bytes], shapes: Shapes, metadata: dict[str, str]) -> None:
        self._file, self._shapes = file, shapes
        if MODELSPEC in metadata:  # hashes are known at the end: their places are kept free, as long as they will be
            metadata = metadata | {name: mark * length for name, (mark, length) in _HASHES.items()}
        self._metadata = metadata
        self._missing = {key: _num_bytes(*shape) for key, shape in shapes.items()}
        self._offsets: dict[str, int] = {}
        self._tensors: dict[str, Any] = {}
        position = 0
        for key in sorted(shapes, key=lambda k: (-shapes[k][0].itemsize, k)):  # wide dtypes first: all stay aligned
            dtype, shape = shapes[key]
            end = position + self._missing[key]
            self._tensors[key] = {
                "dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end],
            }  # fmt: skip
            self._offsets[key], position = position, end
        head = self._head(self._metadata or None)
        self._start = len(head)
        file.write(head)
        file.truncate(self._start + position)

    def _head(self, metadata: Mapping[str, str] | None) -> bytes:
        """Return the length of the header and the header, with the metadata before the tensors' entries."""
        content = self._tensors if metadata is None else {"__metadata__": dict(metadata), **self._tensors}
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def write(self, key: str, value: Tensor, index: int = 0, count: int = 1) -> None:
        value = _checked(self._shapes, key, value, count)
        data = value.reshape(-1).view(torch.uint8)  # strides of sides of one row may be anything
        self._file.seek(self._start + self._offsets[key] + index * data.numel())
        self._file.write(data.numpy().data)
        self._missing[key] -= data.numel()

    def finish(self) -> None:
        _complete(self._missing)
        if MODELSPEC in self._metadata:
            head = self._head(self._metadata | self._hashes())
            assert len(head) == self._start
            self._file.seek(0)
            self._file.write(head)

    def _hashes(self) -> dict[str, str]:
        """Hash the tensors' bytes, which the system still has in memory, a few megabytes at a time.

        ModelSpec's hash and kohya's are of all bytes behind the header. kohya's older one is of 64 KiB a MiB into the file
        as it would be with ss_* alone for metadata, so that editing a title does not change it.
        """
        training = self._head({key: text for key, text in self._metadata.items() if key.startswith("ss_")})
        file_hash, begin = hashlib.sha256(), _LEGACY_AT - len(training)
        self._file.flush()
        with Path(self._file.name).open("rb", buffering=0) as file:
            file.seek(self._start)
            while chunk := file.read(_CHUNK):
                file_hash.update(chunk)
            file.seek(self._start + max(0, begin))
            part = file.read(_LEGACY_BYTES + min(0, begin)) if begin > -_LEGACY_BYTES else b""
        if begin < 0:  # a header of more than a MiB is hashed itself
            part = training[_LEGACY_AT:][:_LEGACY_BYTES] + part
        digest = file_hash.hexdigest()
        legacy = hashlib.sha256(part).hexdigest()[:8]
        return {"modelspec.hash_sha256": f"0x{digest}", "sshs_model_hash": digest, "sshs_legacy_hash": legacy}


class _TorchWriter:
    """Write the records of torch's zip format: a pickle of the names, then one record a tensor."""

    def __init__(self, file: IO[bytes], shapes: Shapes) -> None:
        self._shapes = shapes
        self._missing = {key: _num_bytes(*shape) for key, shape in shapes.items()}
        self._records = {key: str(i) for i, key in enumerate(shapes)}
        self._pieces: dict[str, dict[int, Tensor]] = {}
        self._sink = _Sink(file)
        self._closed = False
        self._file = torch._C.PyTorchFileWriter(self._sink)  # type: ignore[call-overload]
        data = _pickled(shapes, self._records)
        self._file.write_record("data.pkl", data, len(data))
        self._file.write_record("byteorder", b"little", len(b"little"))

    def write(self, key: str, value: Tensor, index: int = 0, count: int = 1) -> None:
        value = _checked(self._shapes, key, value, count)
        if count > 1:
            pieces = self._pieces.setdefault(key, {})
            pieces[index] = value.clone()
            if len(pieces) < count:
                return
            value = torch.cat([pieces[i] for i in range(count)])
            del self._pieces[key]
        storage = value.untyped_storage() if value.storage_offset() == 0 else value.clone().untyped_storage()
        size = value.numel() * value.element_size()
        self._file.write_record(f"data/{self._records[key]}", storage, size)  # type: ignore[arg-type]
        self._sink.check()
        self._missing[key] -= size

    def finish(self) -> None:
        _complete(self._missing)
        self.close()
        self._sink.check()

    def close(self) -> None:
        """End the file, which torch's destructor would do otherwise, whatever became of it."""
        if not self._closed:
            self._closed = True
            self._file.write_end_of_file()


class _Sink:
    """Take torch's bytes, and keep an error for later: one that passes through its C++ would end the process."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        size, remaining = len(data), memoryview(data).cast("B")
        try:
            while self._error is None and len(remaining):
                remaining = remaining[self._file.write(remaining) :]
        except BaseException as error:
            self._error = error
        return size

    def check(self) -> None:
        """Raise what went wrong so far."""
        if self._error is not None:
            raise self._error


class _Storage:
    """Stand for a storage in the pickle; it is written later, as a record of its own."""

    def __init__(self, dtype: torch.dtype, record: str, numel: int) -> None:
        self.pid = ("storage", _typed_storage(dtype), record, "cpu", numel)


class _Later:
    """Stand for a tensor: unpickles as torch._utils._rebuild_tensor_v2 of its storage, as torch.save has it."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], record: str) -> None:
        meta = torch.empty(shape, dtype=dtype, device="meta")
        self._args: tuple[Any, ...] = (
            _Storage(dtype, record, meta.numel()),
            0,
            shape,
            meta.stride(),
            False,
            OrderedDict(),
        )

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return torch._utils._rebuild_tensor_v2, self._args


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None


def _pickled(shapes: Shapes, records: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    content = {key: _Later(dtype, shape, records[key]) for key, (dtype, shape) in shapes.items()}
    _Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue()


def _typed_storage(dtype: torch.dtype) -> type:
    """Return the class that torch.save writes for a dtype: torch.HalfStorage, torch.FloatStorage, …"""
    names = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float64: "Double",
             torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
             torch.bool: "Bool"}  # fmt: skip
    return getattr(torch, f"{names[dtype]}Storage")


def _checked(shapes: Shapes, key: str, value: Tensor, count: int) -> Tensor:
    """Cast to the announced dtype on the host; refuse another shape than announced."""
    dtype, shape = shapes[key]
    expected = (shape[0] // count, *shape[1:]) if count > 1 else shape
    if tuple(value.shape) != tuple(expected):
        raise ValueError(f"{key} has the shape {tuple(value.shape)}, not {tuple(expected)}")
    return value.detach().to("cpu", dtype).contiguous()


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _complete(missing: dict[str, int]) -> None:
    left = [key for key, size in missing.items() if size]
    if left:
        raise ValueError(f"{len(left)} tensors were not written completely: {', '.join(left[:5])}")
