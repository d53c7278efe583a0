"""Where a module's tensor lies in a file of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Say where a module's tensor lies in a file: the key, how it is stored, and which slice of rows."""

    key: str
    form: str = "same"  # same | conv (C, D) as (C, D, 1, 1) | transposed
    index: int = 0
    count: int = 1  # tensors stacked on dim 0 under this key

    def stored(self, tensor: Tensor) -> Tensor:
        """Turn a module's tensor into the file's form."""
        if self.form == "conv":
            return tensor[:, :, None, None]
        return tensor.T.contiguous() if self.form == "transposed" else tensor

    def stored_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor under this key."""
        shape = tuple(shape)
        if self.form == "conv":
            shape = (*shape, 1, 1)
        elif self.form == "transposed":
            shape = shape[::-1]
        return (shape[0] * self.count, *shape[1:]) if self.count > 1 else shape

    def restored(self, tensor: Tensor) -> Tensor:
        """Take a module's tensor out of the file's."""
        if self.count > 1:
            tensor = tensor.chunk(self.count)[self.index]
        if self.form == "conv":
            return tensor.reshape(tensor.shape[:2])
        return tensor.T if self.form == "transposed" else tensor
