"""The last block's text branch: diffusers' SD3 has none, reconstructing the text needs one.

A whole last block modulates its text tokens six ways, the cut one only shifts and scales what its attention reads. The
velocity reads no more than that, so cutting a whole block leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NORM = "norm1_context.linear."
BRANCH = ("attn.to_add_out.", "ff_context.")
Stream = Iterable[tuple[str, "Tensor"]]


def last_block(num_layers: int) -> str:
    """Return what the names of the last block's tensors begin with."""
    return f"transformer_blocks.{num_layers - 1}."


def cut(name: str, num_layers: int) -> bool:
    """Tell whether a tensor of a whole transformer is left out of the cut one."""
    prefix = last_block(num_layers)
    return name.startswith(tuple(prefix + each for each in BRANCH))


def folded(name: str, value: Tensor, num_layers: int) -> Tensor | None:
    """Turn a tensor of a whole transformer into diffusers', whose last block ends its text; None: it has no such one.

    AdaLayerNormZero's rows are shift, scale and gate of attention, then of the feed-forward; AdaLayerNormContinuous has
    scale before shift.
    """
    if name.startswith(last_block(num_layers) + NORM):
        shift, scale, *_ = value.chunk(6)
        return torch.cat((scale, shift))
    return None if cut(name, num_layers) else value


def unfolded(weights: Stream, num_layers: int, fresh: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Turn diffusers' weights into a whole transformer's: the same velocity, and a text branch that begins anew.

    fresh: what the branch begins with, by name. Its gates are zeros, so text leaves the block as it entered it.
    """
    norm = last_block(num_layers) + NORM
    for name, value in weights:
        if name.startswith(norm):
            scale, shift = value.chunk(2)
            yield name, torch.cat((shift, scale, *(torch.zeros_like(scale) for _ in range(4))))
        else:
            yield name, value
    yield from fresh.items()
