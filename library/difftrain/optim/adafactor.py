"""Adafactor (Shazeer and Stern 2018), transformers' as in kohya's scripts, and the schedule that shows its rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from difftrain.optim.making import OptimizerOrder, construct


def make(order: OptimizerOrder) -> Optimizer:
    """Make Adafactor. As kohya: it computes its own rate unless relative_step=False, and warmup_init forces that."""
    from transformers.optimization import Adafactor

    relative = order.given.get("relative_step", True) or order.given.get("warmup_init", False)
    if not relative:
        return _waiting_less(construct(order, Adafactor))
    given = {**order.given, "relative_step": True}
    tables = [{key: value for key, value in table.items() if key != "lr"} for table in order.tables]
    return _waiting_less(construct(OptimizerOrder(order.name, tables, order.lr, given), Adafactor, {"lr": None}))


def _waiting_less(optimizer: Optimizer) -> Optimizer:
    """Let every tensor's rate stay on its device: transformers compares the tensor's size with a number, on the host."""
    given: Callable[[dict[str, Any], dict[str, Any]], Any] = optimizer._get_lr  # type: ignore[attr-defined]

    def rate(group: dict[str, Any], state: dict[str, Any]) -> Any:
        size = state.get("RMS")
        if not group["scale_parameter"] or not isinstance(size, Tensor) or size.device.type == "cpu":
            return given(group, state)
        return given({**group, "scale_parameter": False}, state) * size.clamp(min=group["eps"][1])

    optimizer._get_lr = rate  # type: ignore[attr-defined]
    return optimizer


class AdafactorSchedule(LRScheduler):
    """Show the rate that a relative Adafactor computed for the first tensor of every group; it reads none of it.

    Unlike transformers' it goes by the optimizer's state, so it is right after a restart and without gradients too.
    """

    def __init__(self, optimizer: Optimizer, initial: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = initial
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the last update's rates, before the first one the initial ones."""
        return [self._rate(group, base) for group, base in zip(self.optimizer.param_groups, self.base_lrs)]

    def _rate(self, group: dict[str, Any], base: float | Tensor) -> float:
        state = self.optimizer.state.get(group["params"][0], {})
        return float(self.optimizer._get_lr(group, state)) if state else float(base)  # type: ignore[attr-defined]
