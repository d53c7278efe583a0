"""What stands in a frozen part's place until somebody needs it: its classes are not even imported before.

With a whole cache no text encoder and no VAE is needed, and importing and building them is most of a start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class StandIn(nn.Module):
    """Count as a frozen part that sleeps: as many parameters, on the meta device. make: builds the part itself, there."""

    def __init__(self, count: int, dtype: torch.dtype, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make
        self.weights = nn.Parameter(torch.empty(count, dtype=dtype, device="meta"), requires_grad=False)


def built(module: nn.Module) -> nn.Module:
    """Return a part as it is, or, where something stands in for it, one that is built without weights."""
    return module.make() if isinstance(module, StandIn) else module
