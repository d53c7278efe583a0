"""`load_state` in the middle of an epoch goes on exactly; `save_state` returns when the state is whole.

- The first loop after load_state makes the loader's iterator, which draws its workers' seed from the generator that
  load_state has just put back, and reads ahead: whatever the model draws from then on is another number. Here the
  generators are put back once more when the first batch is there.
- Generators of devices that accelerate does not know by name (NPU) are neither saved nor put back: here they are.
- Ranks leave save_state while the main process still writes; one that goes on to read, copy or delete meets half a
  state. Here they wait for one another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard

from ..patching import Change

_load_state, _save_state, _iter = Accelerator.load_state, Accelerator.save_state, DataLoaderShard.__iter__
_pending: list[Callable[[], None]] = []  # what puts the generators back, for the next loop over a loader


def _file(accelerator: Accelerator, folder: Any) -> Path:
    return Path(str(folder)) / f"device_random_states_{accelerator.process_index}.pt"


def _device_generators(accelerator: Accelerator) -> Any:
    """Return the module of the accelerator that this process computes on, or None on the host."""
    return None if accelerator.device.type == "cpu" else torch.get_device_module(accelerator.device)


@wraps(_save_state)
def save_state(self: Accelerator, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Save, the device's generators too, and wait until everybody has."""
    written = _save_state(self, output_dir, *args, **kwargs)
    module = _device_generators(self)
    if module is not None:
        torch.save(module.get_rng_state(), _file(self, written))
    self.wait_for_everyone()
    return written


@wraps(_load_state)
def load_state(self: Accelerator, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Load, and remember the generators for the first batch that follows."""
    _load_state(self, input_dir, *args, **kwargs)
    module = _device_generators(self)
    if module is not None and input_dir is not None and _file(self, input_dir).exists():
        module.set_rng_state(torch.load(_file(self, input_dir), weights_only=True))
    _pending[:] = [_restorer(module)]


def _restorer(module: Any) -> Callable[[], None]:
    """Return what puts every generator back to where it is now."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = None if module is None else module.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if module is not None:
            module.set_rng_state(device)

    return restore


class _Resumed:
    """A loader whose first batch leaves the generators as they were."""

    def __init__(self, loader: Any, restore: Callable[[], None]) -> None:
        self._loader, self._restore = loader, restore

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # accelerate's loaders are of the class of what they hold
        return self._loader.__class__

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        first = next(batches, _Resumed)
        self._restore()
        if first is not _Resumed:
            yield first
            yield from batches


@wraps(_iter)
def iterate(self: DataLoaderShard) -> Iterator[Any]:
    """Go through the loader; the first time after load_state without touching the generators before the first batch."""
    if not _pending:
        yield from _iter(self)
        return
    loader = self.base_dataloader
    self.base_dataloader = _Resumed(loader, _pending.pop())
    try:
        yield from _iter(self)
    finally:
        self.base_dataloader = loader


def changes() -> Iterator[Change]:
    """Yield what is replaced."""
    yield Accelerator, "save_state", save_state
    yield Accelerator, "load_state", load_state
    yield DataLoaderShard, "__iter__", iterate
