"""Which rank holds the optimizer state of which parameter, and how the others get what it has updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.distributed.ranks import Ranks


class Owners:
    """Know the owner of every parameter. Collective: making it, and share."""

    def __init__(self, mine: list[str], ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._owner = {name: rank for rank, names in enumerate(ranks.gather(mine)) for name in names}

    def mine(self, name: str) -> bool:
        """Tell whether this rank updates a parameter."""
        return self._owner[name] == self._rank

    @torch.no_grad()
    def share(self, names: list[str], held: Callable[[str], list[Tensor]]) -> None:
        """Send the tensors of some parameters from their owners to all: one message an owner, bytes as they are."""
        for rank in sorted({self._owner[name] for name in names}):
            tensors = [each for name in names if self._owner[name] == rank for each in held(name)]
            message = torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors])
            dist.broadcast(message, src=rank)
            if rank == self._rank:
                continue
            sizes = [each.numel() * each.element_size() for each in tensors]
            for tensor, piece in zip(tensors, message.split(sizes)):
                tensor.copy_(_aligned(piece).view(tensor.dtype).view(tensor.shape))


def _aligned(piece: Tensor) -> Tensor:
    """Return bytes that may be read as wider numbers."""
    return piece if piece.storage_offset() % 8 == 0 else piece.clone()
