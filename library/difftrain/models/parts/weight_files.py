"""Files of weights, read one tensor at a time: safetensors, and torch's own without code in it."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class UnreadableWeights(Exception):
    """Say that a file holds no weights that can be read safely, and why."""


class WeightFile(Protocol):
    """Give tensors by key, from disk when they are asked for."""

    metadata: dict[str, str]

    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    def get(self, key: str) -> Tensor: ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise UnreadableWeights(f"is not a whole safetensors file: {error}") from None
        self.metadata = dict(self._file.metadata() or {})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(self._file.get_slice(key).get_shape()) for key in self._file.keys()}  # noqa: SIM118

    def get(self, key: str) -> Tensor:
        return self._file.get_tensor(key)


class _TorchFile:
    """Read with weights_only: a pickle that wants to run code is refused."""

    metadata: dict[str, str]

    def __init__(self, path: Path) -> None:
        content = _torch_load(path)
        content = content.get("state_dict", content) if isinstance(content, dict) else content
        if not isinstance(content, dict) or not any(isinstance(v, torch.Tensor) for v in content.values()):
            raise UnreadableWeights("holds no dictionary of tensors")
        self._tensors = {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}
        self.metadata = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(value.shape) for key, value in self._tensors.items()}

    def get(self, key: str) -> Tensor:
        return self._tensors[key]


def _torch_load(path: Path) -> Any:
    try:
        # only the zip format can be mapped; older files are read whole
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise UnreadableWeights(
            f"is not a file of plain tensors (it is read with weights_only, so that it cannot run code): {reason}; "
            "convert it to safetensors on a machine where you trust it"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise UnreadableWeights(
            f"is not a whole torch file: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None


def open_weights(path: Path) -> WeightFile:
    """Open a file of weights by its suffix. Raises UnreadableWeights."""
    return _Safetensors(path) if path.suffix == ".safetensors" else _TorchFile(path)
