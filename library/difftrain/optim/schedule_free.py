"""Schedule-free optimizers (Defazio et al. 2024): no decay of the rate, but an average of the weights.

Trained are weights y, where gradients are taken; meant to be used is the average x, which eval() puts in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.optim import arguments
from difftrain.optim.making import OptimizerOrder, construct, package_of

_ARGS = "optimizer.schedulefree_wrapper_args"


def make(order: OptimizerOrder) -> Optimizer:
    """Make the named one, of the package schedulefree."""
    with package_of(order.name):
        import schedulefree
    return construct(order, getattr(schedulefree, order.name))


def wrap(base: Optimizer, settings: dict[str, Any]) -> Optimizer:
    """Average around any optimizer. Raises ConfigFault for arguments that are not known or out of range."""
    arguments.check(option(_ARGS), "the wrapper", ScheduleFree, settings, ("base",))
    try:
        return ScheduleFree(base, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigFault([Fault(option(_ARGS), str(error))]) from error


class ScheduleFree(Optimizer):
    """Average around any optimizer, by the formulas of schedulefree's own wrapper.

    The base updates z; x is the average of z, weighted by the highest rate so far to weight_lr_power and by the step's
    number to r; y = momentum x + (1 - momentum) z. weight_decay_at_y: decay by the weights that are trained.

    That package's wrapper (1.4.1) puts z into the state that torch's Adam takes for its own and then finds empty; here
    z joins it after the base's first update. State and groups are the base's, so schedules and checkpoints see both.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        momentum: float = 0.9,
        weight_decay_at_y: float = 0.0,
        weight_lr_power: float = 2.0,
        r: float = 0.0,
    ) -> None:
        if not 0.0 < momentum < 1.0:
            raise ValueError(f"momentum must lie above 0 and below 1, got {momentum}")
        self.base, self.defaults = base, base.defaults
        self.momentum, self.decay, self.power, self.r = momentum, weight_decay_at_y, weight_lr_power, r
        self._training = True

    @property
    def state_kind(self) -> str:
        """Name what the state is of: another base's would not fit."""
        kind = type(self.base)
        return f"schedule-free {kind.__module__}.{kind.__name__}"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def train(self) -> None:
        """Put y in place."""
        if not self._training:
            # y = x + (1 - momentum) (z - x), from x in place
            self._move(1.0 - self.momentum)
        self._training = True

    @torch.no_grad()
    def eval(self) -> None:
        """Put x in place. The way back is exact but for rounding: the engine keeps y aside."""
        if self._training:
            # the same solved for x, from y in place
            self._move(1.0 - 1.0 / self.momentum)
        self._training = False

    def _move(self, share: float) -> None:
        for group in self.param_groups:
            for weights in group["params"]:
                if "z" in self.state.get(weights, {}):
                    weights.lerp_(self.state[weights]["z"], share)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update z by the base, and x and y by z; closures are not for it."""
        assert self._training and closure is None
        # the base sees z alone; x waits in the memory of the last z
        averages = {weights: self._to_z(weights, group["lr"]) for group, weights in self._moving()}
        self.base.step()
        shares = {id(group): self._share(group) for group in self.param_groups}
        for group, weights in self._moving():
            x, z = averages.pop(weights), weights.clone()
            # x <- x + share (z - x), and y between the new x and z
            weights.copy_(x).lerp_(z, shares[id(group)]).lerp_(z, 1.0 - self.momentum)
            self.state[weights]["z"] = x.copy_(z)  # the same memory at every step

    def _moving(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            yield from ((group, weights) for weights in group["params"] if weights.grad is not None)

    def _to_z(self, weights: Tensor, rate: float) -> Tensor:
        """Put z in the place of y and return x, in the memory of z where there is some."""
        z = self.state.get(weights, {}).get("z")
        z = weights.clone() if z is None else z
        if self.decay:
            # decay taken at y moves z by it, and y by the part that z has in it
            z.sub_(weights, alpha=rate * self.decay)
            weights.sub_(weights, alpha=rate * self.decay * (1.0 - self.momentum))
        x = weights.lerp(z, 1.0 - 1.0 / self.momentum)
        weights.copy_(z)
        return z.copy_(x)

    def _share(self, group: dict[str, Any]) -> float:
        """Return the share of the new z in the average, and count on."""
        step = group["sf_step"] = group.get("sf_step", 0) + 1
        # weights of the average: the highest rate so far, so that a warm-up counts little
        highest = group["sf_highest"] = max(group["lr"] * group.get("d", 1.0), group.get("sf_highest", 0.0))
        weight = step**self.r * highest**self.power
        total = group["sf_total"] = group.get("sf_total", 0.0) + weight
        return weight / total if total else 0.0


def averages(optimizer: Optimizer) -> bool:
    """Say whether the weights that are meant to be used are others than those that are trained."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
