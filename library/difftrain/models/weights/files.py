"""Files of weights, read one tensor at a time: safetensors, and torch's own without code in it."""

from __future__ import annotations

import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch

from difftrain.contracts import ConfigFault, Fault
from difftrain.io.files import open_regular, read_json_object, refuse_irregular
from difftrain.models.weights.torch_files import UnreadableWeights, check_torch_file

if TYPE_CHECKING:
    from torch import Tensor


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


_MOST_HEADER = 100_000_000  # bytes, as safetensors has it


class WeightFile(Protocol):
    """Give tensors by key, from disk when they are asked for."""

    metadata: dict[str, str]

    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    def get(self, key: str) -> Tensor: ...


def dtypes_of(path: Path) -> set[torch.dtype]:
    """Return the dtypes of the tensors in a safetensors file, from its header. Raises UnreadableWeights."""
    return {dtype for dtype, *_ in _ReadSafetensors(path).places()}


class Renamed:
    """Give some tensors of a file under other keys."""

    def __init__(self, file: WeightFile, names: Mapping[str, str]) -> None:
        self._file, self._names, self.metadata = file, names, file.metadata
        self._back = {new: old for old, new in names.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self._names.get(key, key): shape for key, shape in self._file.shapes().items()}

    def get(self, key: str) -> Tensor:
        return self._file.get(self._back.get(key, key))


class _Safetensors:
    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            refuse_irregular(path)
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise UnreadableWeights(f"is not a complete safetensors file: {error}") from None
        self.metadata = dict(self._file.metadata() or {})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(self._file.get_slice(key).get_shape()) for key in self._file.keys()}  # noqa: SIM118

    def get(self, key: str) -> Tensor:
        return self._file.get_tensor(key)


class _ReadSafetensors:
    """Read a safetensors file by plain reads, a tensor at a time: no map of it, and no second copy in memory.

    Format: the length of a JSON header as 8 bytes, the header, and the tensors at the offsets that it gives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open_regular(path) as file:
                length = int.from_bytes(file.read(8), "little")
                size = file.seek(0, os.SEEK_END)
                if not 2 <= length <= min(size - 8, _MOST_HEADER):
                    raise UnreadableWeights(f"is not a complete safetensors file: {size} bytes, a header of {length}")
                file.seek(8)
                header = json.loads(file.read(length))
            self._start = 8 + length
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._places = {key: _entry_of(entry, size - self._start) for key, entry in header.items()}
            if not isinstance(self.metadata, dict) or not all(isinstance(text, str) for text in self.metadata.values()):
                raise UnreadableWeights("is not a complete safetensors file: its metadata is not text")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UnreadableWeights(f"is not a complete safetensors file: {error}") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: shape for key, (_, shape, _, _) in self._places.items()}

    def places(self) -> Iterable[tuple[torch.dtype, tuple[int, ...], int, int]]:
        return self._places.values()

    def get(self, key: str) -> Tensor:
        dtype, shape, start, stop = self._places[key]
        value = torch.empty(shape, dtype=dtype)
        if stop > start:
            room = value.reshape(-1).view(torch.uint8).numpy()
            with self._path.open("rb", buffering=0) as file:
                file.seek(self._start + start)
                _fill(file, room.data)
        return value


def _entry_of(entry: dict[str, Any], size: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return dtype, shape, start and stop of a tensor. Raises ValueError where they do not fit together."""
    dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(side) is not int or side < 0 for side in shape):
        raise ValueError(f"a tensor of shape {shape}")
    if stop - start != math.prod(shape) * dtype.itemsize or not 0 <= start <= stop <= size:
        raise ValueError(f"a tensor of shape {shape} at {start} to {stop} of {size} bytes")
    return dtype, shape, start, stop


def _fill(file: IO[bytes], room: memoryview) -> None:
    while room:
        count = file.readinto(room)  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file of weights became shorter while it was read")
        room = room[count:]


class _TorchFile:
    """Read with weights_only: a pickle that wants to run code is refused."""

    metadata: dict[str, str]

    def __init__(self, path: Path, mmap: bool) -> None:
        content = _torch_load(path, mmap)
        content = content.get("state_dict", content) if isinstance(content, dict) else content
        if not isinstance(content, dict) or not any(isinstance(v, torch.Tensor) for v in content.values()):
            raise UnreadableWeights("is not a dictionary of tensors")
        self._tensors = {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}
        self.metadata = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(value.shape) for key, value in self._tensors.items()}

    def get(self, key: str) -> Tensor:
        return self._tensors[key]


def _torch_load(path: Path, mmap: bool) -> Any:
    try:
        check_torch_file(path)
        # only the zip format can be mapped; older files are read whole
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except UnreadableWeights:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise UnreadableWeights(
            f"is not a file of plain tensors (it is read with weights_only, so that it cannot run code): {reason}; "
            "convert it to safetensors on a machine where you trust it"
        ) from None
    except Exception as error:  # bytes that are no pickle make its reader raise anything: struct.error, IndexError, ...
        raise UnreadableWeights(
            f"is not a complete torch file: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None


def open_weights(path: Path, *, mmap: bool = True) -> WeightFile:
    """Open a file of weights by its suffix. mmap: map it into memory where that can be. Raises UnreadableWeights."""
    if path.suffix != ".safetensors":
        return _TorchFile(path, mmap)
    return _Safetensors(path) if mmap else _ReadSafetensors(path)


# --- The files that hold one part of a model: found by their usual names, opened, and what of them is no weight


MODEL_STEMS, TEXT_STEMS = ("diffusion_pytorch_model",), ("model", "pytorch_model")


def opened(path: Path, flag: str, *, mmap: bool = True) -> WeightFile:
    """Open a file of weights. Raises ConfigFault that names the flag."""
    try:
        return open_weights(path, mmap=mmap)
    except UnreadableWeights as error:
        raise ConfigFault([Fault(flag, f"{path} {error}")]) from None


SCALES = ("scale_weight", "weight_scale")  # what files call the scale of a weight of fp8, beside it (ComfyUI)
_OF_FP8 = (*SCALES, "scale_input", "input_scale", "comfy_quant")


def is_of_fp8(key: str) -> bool:
    """Tell what files of scaled fp8 carry beside the weights: scales, and the mark that they are such files."""
    leaf = key.rpartition(".")[2]
    return leaf == "scaled_fp8" or leaf in _OF_FP8


def is_extra(key: str) -> bool:
    """Tell buffers and training helpers that files carry beside the weights."""
    return (
        is_of_fp8(key)
        or key.endswith(("embeddings.position_ids", "._extra_state"))
        or key.startswith(("loss.", "model_ema."))
    )


def find_weights(folder: Path, stems: Sequence[str], flag: str) -> list[Path]:
    """List the files with a part's weights: whole or in shards, fp16 variants where nothing else is there.

    Raises ConfigFault that names what was looked for.
    """
    kinds = [(stem, variant, end) for variant in ("", ".fp16") for end in (".safetensors", ".bin") for stem in stems]
    for stem, variant, end in kinds:
        file = folder / f"{stem}{variant}{end}"
        if file.is_file():
            return [file]
        # diffusers and transformers put a variant behind "index"
        for index in (file.with_name(f"{file.name}.index.json"), folder / f"{stem}{end}.index{variant}.json"):
            if index.is_file():
                return _shards(index, flag)
    names = ", ".join("".join(kind) for kind in kinds)
    raise ConfigFault([Fault(flag, f"{folder} has no weights", f"looked for {names} and their .index.json")])


def _shards(index: Path, flag: str) -> list[Path]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(map(_is_beside, places.values())):
        raise ConfigFault([Fault(flag, f"{index} lists no files of weights", "fetch the folder again")])
    return [index.parent / name for name in sorted(set(places.values()))]


def _is_beside(name: object) -> bool:
    """Tell the name of a file in the index's own folder: an index of a hub names none elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing where there is none, or no object."""
    return read_json_object(path) or {}
