"""Optimizers that estimate the learning rate: D-Adaptation (Defazio and Mishchenko 2023) and Prodigy (2024).

The estimate d and what it is made of live in the parameter groups; the rate of a group is a factor of d, about 1.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from difftrain.config.schema.names import FIRST_RATE
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.optim.making import TYPE, OptimizerOrder, construct, package_of


def make(order: OptimizerOrder) -> Optimizer:
    """Make the named one. Raises ConfigFault where groups have rates of their own and it would stop at them."""
    rates = {table["lr"] for table in order.tables}
    if len(rates) > 1 and order.name not in FIRST_RATE:
        what = f"{order.name} takes one rate for all groups, there are {', '.join(f'{r:g}' for r in sorted(rates))}"
        raise ConfigFault([Fault(option(TYPE), what, "give one rate for everything")])
    return construct(order, _class(order.name))


def _class(name: str) -> Callable[..., Optimizer]:
    with package_of(name):
        if name == "Prodigy":
            from prodigyopt import Prodigy

            return Prodigy
        import dadaptation
        from dadaptation import experimental
    name = {"DAdaptation": "DAdaptAdamPreprint"}.get(name, name)
    return getattr(experimental if name in ("DAdaptAdamPreprint", "DAdaptAdanIP") else dadaptation, name)


def estimate(optimizer: Optimizer) -> float | Tensor | None:
    """Return d where the optimizer estimates it, as the next update will use it; where that keeps it, so no wait."""
    d = optimizer.param_groups[0].get("d")
    if isinstance(d, Tensor):  # DAdaptAdanIP's
        return d.detach().clone() if d.ndim == 0 else None
    return d if isinstance(d, float) else None
