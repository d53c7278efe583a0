"""A batch on its way from a loader worker: all its tensors in one piece of shared memory.

Each tensor that is sent by itself has memory of its own, for which the receiver connects to the sender: a good part of a
millisecond each, and a step from a cache has a dozen and a half of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from difftrain.contracts import Batch

_ALIGN = 64  # bytes: where a tensor may begin
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Parcel:
    """A batch without its tensors, and these one behind another. places: name -> (first byte, dtype, shape)."""

    batch: Batch
    places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]]
    content: torch.Tensor

    def opened(self) -> Batch:
        """Return the batch; its tensors look into the parcel."""
        found = {name: self._tensor(*place) for name, place in self.places.items()}

        def under(prefix: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}

        return replace(
            self.batch,
            record_id=found["record_id"],
            occurrence=found["occurrence"],
            features=under("features."),
            draws=under("draws."),
            loss_mask=found.get("loss_mask"),
        )

    def _tensor(self, first: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape) * dtype.itemsize
        return self.content[first : first + count].view(dtype).view(shape)


def parcelled(item: Any) -> Any:
    """Put a batch into a parcel; anything else stays as it is."""
    if not isinstance(item, Batch):
        return item
    tensors = {**item.tensors(), "record_id": item.record_id, "occurrence": item.occurrence}
    places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
    size = 0
    for name, tensor in tensors.items():
        places[name] = (size, tensor.dtype, tuple(tensor.shape))
        size += -(-tensor.nbytes // _ALIGN) * _ALIGN
    content = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))  # no copy when it is sent
    empty = replace(item, record_id=_NONE, occurrence=_NONE, features={}, draws={}, loss_mask=None)
    parcel = Parcel(empty, places, content)
    for name, place in places.items():
        parcel._tensor(*place).copy_(tensors[name])
    return parcel


def opened(item: Any) -> Any:
    """Take a batch out of its parcel; anything else stays as it is."""
    return item.opened() if isinstance(item, Parcel) else item
