"""Lion (Chen et al. 2023), of the package lion-pytorch."""

from __future__ import annotations

from torch.optim import Optimizer

from difftrain.optim.making import OptimizerOrder, construct, package_of


def make(order: OptimizerOrder) -> Optimizer:
    """Make Lion."""
    with package_of(order.name):
        from lion_pytorch import Lion
    return construct(order, Lion)
