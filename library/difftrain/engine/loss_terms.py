"""The terms of a loss as sums over samples, so that any split into micro batches and ranks gives the same figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from difftrain.contracts import METRIC

if TYPE_CHECKING:
    from torch import Tensor

TOTAL = "loss"
COUNT = "samples"  # counts of a term's own have its name; the others are of samples


class LossTerms:
    """Add up terms by name. names: sorted; known from the first forward on."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def learn(self, terms: Mapping[str, Tensor]) -> None:
        """Take the names from a batch's terms, once."""
        if self.names:
            return
        of_loss = [name for name in terms if is_loss(name)]
        assert TOTAL not in of_loss or len(of_loss) == 1, f"{TOTAL} is the total of the terms {sorted(of_loss)}"
        self.names = sorted(terms)

    def loss(self, terms: Mapping[str, Tensor], counts: Mapping[str, float]) -> Tensor:
        """Return a micro batch's share of the global mean: what is backpropagated."""
        return add(terms[name] / counts.get(name, counts[COUNT]) for name in self.names if is_loss(name))

    def vector(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the sums in the order of names, fp32: one tensor to be reduced."""
        return torch.stack([terms[name].detach().float() for name in self.names])

    def sums(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the sums of a vector by name, and their total."""
        return _with_total({name: vector[i] for i, name in enumerate(self.names)})

    def means(self, vector: Tensor, counts: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the means of global sums by name, and their total."""
        return _with_total({name: vector[i] / counts.get(name, counts[COUNT]) for i, name in enumerate(self.names)})


def is_loss(name: str) -> bool:
    """Tell whether a term belongs to the loss; the others are measured beside it."""
    return not name.startswith(METRIC)


def add(values: Iterable[Tensor]) -> Tensor:
    """Add scalars up in one operation."""
    return torch.stack(list(values)).sum()


def _with_total(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**terms, TOTAL: add(value for name, value in terms.items() if is_loss(name))}
