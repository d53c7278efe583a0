"""ShardedGradScaler on any device: an overflow that one rank sees is seen by all.

Upstream switches it off where there is no CUDA, so that fp16 trains unscaled and inf reaches the weights; it refuses other
devices' tensors by name, and on the host the growth counter turns into a plain number that cannot be saved. torch's own
scaler does all of that right for every device. What is missing there is the exchange: with sharded gradients a rank sees
its own part alone, and ranks that disagree about a step wait for one another for ever, or part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fairscale.optim.grad_scaler import ShardedGradScaler
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..patching import Change


def device_kind() -> str:
    """Name the kind of the accelerator that torch knows of, or the host."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def init(
    self: ShardedGradScaler,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
    process_group: Any = None,
    device: str | None = None,
) -> None:
    """Make a scaler. device: the kind of what will be scaled; unset: the accelerator, where there is one."""
    settings = (init_scale, growth_factor, backoff_factor, growth_interval, enabled)
    GradScaler.__init__(self, device or device_kind(), *settings)
    self.group = process_group


def unscale(self: ShardedGradScaler, optimizer: Optimizer) -> None:
    """Unscale this rank's gradients, and let every rank know of an overflow in any of them."""
    if not self._enabled:
        return
    GradScaler.unscale_(self, optimizer)
    state = self._per_optimizer_states[id(optimizer)]
    mine = [each.reshape(()) for each in state["found_inf_per_device"].values()]
    found = torch.zeros((), device=self._scale.device)  # a rank that owns nothing takes part too
    for each in mine:
        found = torch.maximum(found, each.to(found.device))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
    for each in mine:
        each.copy_(found)
    if not mine:
        state["found_inf_per_device"] = {found.device: found}


def unscale_gradients(
    self: ShardedGradScaler, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Unscale fp16 gradients too, as upstream does."""
    return GradScaler._unscale_grads_(self, optimizer, inv_scale, found_inf, True)


def changes() -> Iterator[Change]:
    """Yield what is replaced."""
    yield ShardedGradScaler, "__init__", init
    yield ShardedGradScaler, "unscale_", unscale
    yield ShardedGradScaler, "_unscale_grads_", unscale_gradients
    for name in ("scale", "step", "update"):
        yield ShardedGradScaler, name, vars(GradScaler)[name]
