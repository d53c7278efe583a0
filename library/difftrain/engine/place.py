"""Where a schedule is: brought back by its formula, by its own state, or by as many steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from difftrain.contracts import TrainingFault
from difftrain.engine.plain import decode, encode

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class SchedulePlace:
    """Remember how a schedule began, to tell what has changed in it since. Made before its first step."""

    def __init__(self, schedule: LRScheduler, optimizer: Optimizer) -> None:
        self._schedule, self._optimizer = schedule, optimizer
        self._start = self._state()

    def describe(self) -> dict[str, Any]:
        """Return as JSON how it began and what is different now; nothing where it cannot be said, or need not be."""
        now = self._state()
        if isinstance(self._schedule, LambdaLR) or self._start is None or now is None:
            return {}
        return {
            "start": self._start,
            "now": {key: value for key, value in now.items() if value != self._start.get(key)},
        }

    def go_to(self, position: int, told: Mapping[str, Any], rates: list[float]) -> None:
        """Bring the schedule to a position.

        One without a formula takes back what `describe` told, where it began as this one did: the same class, arguments
        and rates. Otherwise what the user changed counts, and the steps are made again.
        """
        if isinstance(self._schedule, LambdaLR):
            if position:
                self._schedule.last_epoch = position - 1
                self._schedule.step()
        elif told and told["start"] == self._start:
            now = {key: decode(value, _no_tensors) for key, value in told["now"].items()}
            self._schedule.load_state_dict({**self._schedule.state_dict(), **now})
            for group, rate in zip(self._optimizer.param_groups, rates):
                group["lr"] = rate
        else:
            for _ in range(position):
                self._schedule.step()

    def _state(self) -> dict[str, Any] | None:
        """Return its state as JSON, or None where a part of it cannot be written down."""
        kind = type(self._schedule)
        try:
            state = {key: encode(value, key, _keep_none) for key, value in self._schedule.state_dict().items()}
        except TrainingFault:
            return None
        return json.loads(json.dumps({**state, "class": f"{kind.__module__}.{kind.__name__}"}))


def _keep_none(name: str, tensor: Tensor) -> None:
    raise TrainingFault(f"the schedule keeps {name} as a tensor")


def _no_tensors(name: str) -> Tensor:
    raise KeyError(name)
