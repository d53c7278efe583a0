"""What every file of optimizers needs: the order, a package that may be missing, and faults instead of tracebacks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from difftrain.config.hidden_imports import let_in
from difftrain.config.schema import names
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, Group
from difftrain.optim import arguments

TYPE, ARGS = "optimizer.type", "optimizer.args"  # what faults are about


@dataclass(frozen=True)
class OptimizerOrder:
    """Ask for an optimizer.

    name: as the registry spells it. tables: parameter groups in torch's form. lr: of groups without one. arguments: the
    user's arguments. fused_ok: the device runs torch's fused kernels. trial: the update will be made where the
    parameters are now, so a package that may not know that device is tried there. groups: what the tables are made of.
    """

    name: str
    tables: list[dict[str, Any]]
    lr: float
    arguments: dict[str, Any]
    dp_size: int = 1
    fused_ok: bool = True
    trial: bool = True
    groups: tuple[Group, ...] = ()


class WeightwiseOptimizer(Optimizer):
    """Update each weight from its own gradient and state alone, as `update_weight` says."""

    steps_apart = True  # so updates may run during the backward pass

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update; closures are not for it."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update_weight(weight, group)

    def update_weight(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Update one weight that has a gradient."""
        raise NotImplementedError


def construct(
    order: OptimizerOrder, kind: Callable[..., Optimizer], defaults: Mapping[str, Any] | None = None, **ours: Any
) -> Optimizer:
    """Make an optimizer of a class. defaults: give way to the user's arguments; ours: he may not give them.

    Raises ConfigFault for arguments that the class does not take, or refuses.
    """
    arguments.check(option(ARGS), order.name, kind, order.arguments, ("params", "lr", *ours))
    settings = {"lr": order.lr, **(defaults or {}), **ours, **order.arguments}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some print what their arguments are
            return kind(order.tables, **settings)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = str(error) or "they are out of its range"
        raise ConfigFault([Fault(option(ARGS), f"{order.name} refuses them: {reason}")]) from error


@contextmanager
def package_of(name: str) -> Iterator[None]:
    """Import an optimizer's package inside; one that is missing or does not load is a fault that names it."""
    module, pip = names.PACKAGES[name]
    let_in(module)
    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] == module:
            what, remedy = f"{name} is in the package {pip}, which is not installed", f"pip install {pip}"
        else:
            what, remedy = f"{name} needs the package {pip}, which does not load: {error}", f"pip install -U {pip}"
        raise ConfigFault([Fault(option(TYPE), what, remedy)]) from error
