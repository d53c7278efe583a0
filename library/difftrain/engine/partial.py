"""Stepping an optimizer on some of its parameters: one optimizer, one state, one schedule, whatever the order."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from difftrain.optim import inner

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Packages whose optimizers update each parameter from its own gradient and state alone. Others (Prodigy, D-Adaptation,
# schedule-free) measure something over all gradients, or count updates in their groups: they are stepped whole.
_APART = frozenset({"torch", "bitsandbytes", "transformers", "lion_pytorch"})  # one of ours says it itself


def steps_apart(optimizer: Optimizer) -> bool:
    """Tell whether stepping on parts, one after another, is stepping on the whole."""
    kind = type(inner(optimizer))
    return kind.__module__.partition(".")[0] in _APART or getattr(kind, "steps_apart", False)


@contextmanager
def only(optimizer: Optimizer, parameters: Container[int]) -> Iterator[Optimizer]:
    """Let an optimizer see the parameters with these ids alone, with its state and its settings of now.

    What it would write into its groups is lost: for optimizers that step apart.
    """
    whole = optimizer.param_groups
    chosen = ((group, [each for each in group["params"] if id(each) in parameters]) for group in whole)
    optimizer.param_groups = [{**group, "params": found} for group, found in chosen if found]
    try:
        yield optimizer
    finally:
        optimizer.param_groups = whole
