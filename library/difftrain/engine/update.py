"""One optimizer update: unscale, measure, clip, and skip what is not finite, without the host looking on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from difftrain.contracts import METRIC
from difftrain.engine.gradients import largest_of
from difftrain.optim import inner

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from difftrain.engine.master_weights import MasterWeights


class Updated(NamedTuple):
    """The gradient's global norm before clipping, and 1.0 where the update was not applied: device tensors."""

    grad_norm: Tensor
    skipped: Tensor


class Update:
    """Turn gradients into an update: after the backward pass, or while it runs. loss: the global one, made when asked."""

    needs_loss = False  # before the step's last backward: then there is a method `ready`, which takes it
    ready: Callable[[Callable[[], Tensor]], None]

    def __init__(self, master_weights: MasterWeights, max_grad_norm: float = 0.0) -> None:
        self._master_weights, self._optimizer = master_weights, master_weights.optimizer
        self._max_norm = max_grad_norm  # 0 does not clip

    def missing_gradients(self) -> list[str]:
        """Name the parameters without a gradient."""
        return self._master_weights.missing_gradients()

    def largest_gradients(self) -> dict[str, Tensor]:
        """Return the largest magnitude of each gradient that this rank has, on the device."""
        return largest_of({name: weight.grad for name, weight in self._master_weights.weights.items()})

    def finish(self, loss: Callable[[], Tensor]) -> Updated:
        """End the step, behind its last backward."""
        raise NotImplementedError


class AfterBackward(Update):
    """Apply all gradients at once, which are the same on every rank; so is everything decided here.

    norm: of all gradients, where the weights that are here are not all.
    """

    def __init__(
        self,
        master_weights: MasterWeights,
        scaler: GradScaler | None,
        max_grad_norm: float,
        norm: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> None:
        super().__init__(master_weights, max_grad_norm)
        self._scaler, self._norm = scaler, norm or master_weights.norm

    @torch.no_grad()
    def finish(self, loss: Callable[[], Tensor]) -> Updated:
        """Update, unless loss or gradients are not finite; free the gradients."""
        # --- unscale, measure, clip
        master_weights, scaler = self._master_weights, self._scaler
        gradients, total = master_weights.gradients(), loss()  # every rank takes part in the loss
        # a finite loss adds 0; any other makes the norm non-finite, and no host had to look
        if filled := [gradient for gradient in gradients if gradient.numel()]:  # sharded ones may all be elsewhere
            _poison(filled[0], total)
        # the scaler finds gradients through groups: of half weights they are not the optimizer's own
        seen = master_weights.for_scaler()
        flags: list[Tensor] = []
        if scaler is not None:
            scaler.unscale_(seen)
            flags = overflow_flags(scaler, seen)
            if (group := master_weights.group) is not None:  # so that the loss scales of its ranks stay one
                for flag in flags:
                    flag.copy_(group.all_reduce(flag, dist.ReduceOp.MAX))
        norm = self._norm(gradients)
        if self._max_norm > 0:
            master_weights.clip(self._max_norm, norm)

        # --- step, or leave everything as it is
        # 1.0 or 0.0 on the device, which a fused optimizer reads there
        skipped = torch.isfinite(norm).logical_not().float()
        for flag in flags:
            skipped = torch.maximum(skipped, flag.reshape(()).float().to(skipped.device))
        if may_step(self._optimizer, skipped):
            master_weights.step(lambda optimizer: step(optimizer, skipped))
        master_weights.clear()
        if scaler is not None:
            scaler.update()
        return Updated(norm, skipped)


def _poison(gradient: Tensor, loss: Tensor) -> None:
    """Carry a loss that is not finite into the gradients, where the scaler and the norm see it: x + 0 else."""
    # inf * 0 and nan * 0 are nan
    gradient[(0,) * gradient.ndim].add_(loss * 0.0)


def overflow_flags(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """Return what unscale_ found on each device, 1.0 or 0.0.

    Read from the scaler's record because GradScaler.step, the public way, waits for the host with every optimizer
    that it does not know to be fused, a sharding one among them.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def may_step(optimizer: Optimizer, skipped: Tensor) -> bool:
    """Tell whether to step. A fused optimizer reads the flag on the device; with others the host has to look."""
    return _reads_flag(optimizer, skipped) or not skipped


def step(optimizer: Optimizer, skipped: Tensor) -> None:
    """Step; an optimizer that reads the flag does nothing where it is set."""
    if not _reads_flag(optimizer, skipped):
        optimizer.step()
        return
    worker = inner(optimizer)
    worker.found_inf = skipped  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del worker.found_inf  # type: ignore[attr-defined]


def _reads_flag(optimizer: Optimizer, skipped: Tensor) -> bool:
    return not _looking_is_free(skipped) and getattr(inner(optimizer), "_step_supports_amp_scaling", False)


def _looking_is_free(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


# --- The terms of a loss as sums over samples, so that any split into micro batches and ranks gives the same figures


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
        # one all-reduce of a vector in place of one for each term
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
