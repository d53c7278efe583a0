"""One optimizer update: unscale, measure, clip, and skip what is not finite, without the host looking on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from difftrain.optim import inner

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer


class Updated(NamedTuple):
    """The gradient's global norm before clipping, and 1.0 where the update was not applied: device tensors."""

    grad_norm: Tensor
    skipped: Tensor


@torch.no_grad()
def update(
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    loss: Tensor,
    scaler: GradScaler | None,
    max_grad_norm: float,
) -> Updated:
    """Apply the gradients, which are the same on every rank and so is everything decided here.

    loss: the global one; where it is not finite, neither is the update. max_grad_norm: 0 does not clip.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    _poison(gradients[0], loss)
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = get_total_norm(gradients)
    if max_grad_norm > 0:
        clip_grads_with_norm_(parameters, max_grad_norm, norm)
    skipped = torch.isfinite(norm).logical_not().float()
    if scaler is not None:
        skipped = torch.maximum(skipped, _overflow(scaler, optimizer).to(skipped.device))
    _apply(optimizer, skipped)
    if scaler is not None:
        scaler.update()
    return Updated(norm, skipped)


def _poison(gradient: Tensor, loss: Tensor) -> None:
    """Carry a loss that is not finite into the gradients, where the scaler and the norm see it: x + 0 else."""
    gradient[(0,) * gradient.ndim].add_(loss * 0.0)


def _overflow(scaler: GradScaler, optimizer: Optimizer) -> Tensor:
    """Return what unscale_ found, 1.0 or 0.0.

    Read from the scaler's record because GradScaler.step, the public way, waits for the host with every optimizer
    that it does not know to be fused, a sharding one among them.
    """
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    return torch.stack([each.reshape(()).float() for each in found]).amax()


def _apply(optimizer: Optimizer, skipped: Tensor) -> None:
    """Step unless skipped. A fused optimizer reads the flag on the device; with others the host has to look."""
    worker = inner(optimizer)
    if not _looking_is_free(skipped) and getattr(worker, "_step_supports_amp_scaling", False):
        worker.found_inf = skipped  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del worker.found_inf  # type: ignore[attr-defined]
    elif not skipped:
        optimizer.step()


def _looking_is_free(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
