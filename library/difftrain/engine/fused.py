"""Updates while the backward pass runs: a gradient is used as soon as it is whole, and freed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.engine.master_weights import norms, runs, steps_apart
from difftrain.engine.update import Update, Updated, may_step, step
from difftrain.optim import inner

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.contracts import Group
    from difftrain.distributed.ranks import Ranks
    from difftrain.engine.master_weights import MasterWeights


class DuringBackward(Update):
    """Apply the gradients of a few parameters at a time, in hooks that autograd calls in the same order on every rank.

    Two things differ from an update after the backward, and cannot be had here: each gradient is clipped by its own
    norm (as kohya does), since the norm of all is not known yet; and where a gradient that is not finite turns up, what
    came before it in this step has been applied, it and all that come after it are not. A loss that is not finite skips
    the whole step, since it is known before the backward.
    """

    needs_loss = True

    def __init__(
        self,
        master_weights: MasterWeights,
        parts: list[list[str]],
        ranks: Ranks,
        max_grad_norm: float,
    ) -> None:
        optimizer = master_weights.optimizer
        if inner(optimizer) is not optimizer or not steps_apart(optimizer):
            name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            what = f"{name} needs all gradients at once, and cannot update during the backward pass"
            remedy = "AdamW or Adafactor, or an update after the backward pass"
            raise ConfigFault([Fault(option("optimizer.type"), what, remedy)])
        super().__init__(master_weights, max_grad_norm)
        self._parts, self._ranks = parts, ranks
        self._armed = False
        self._waiting: list[set[str]] = []
        self._skipped: Tensor | None = None
        self._squares: list[Tensor] = []
        self._norms: dict[str, Tensor] | None = {}  # of the first step's gradients, which are freed on the way
        for number, names in enumerate(parts):
            for name in names:
                master_weights.weights[name].register_post_accumulate_grad_hook(self._hook(number, name))

    def _hook(self, number: int, name: str) -> Callable[[nn.Parameter], None]:
        # the garbage collector does not look into hooks of tensors: one that held the weights would keep them for ever
        owner = weakref.ref(self)

        def arrived(parameter: nn.Parameter) -> None:
            update = owner()
            if update is not None and update._armed:
                update._waiting[number].discard(name)
                if not update._waiting[number]:
                    update._update(update._parts[number])

        return arrived

    def ready(self, loss: Callable[[], Tensor]) -> None:
        """Let the next backward update; with a loss that is not finite it does nothing but free gradients."""
        self._armed = True
        self._waiting = [set(names) for names in self._parts]
        self._skipped = torch.isfinite(loss()).logical_not().float()
        self._squares = []

    def missing_gradients(self) -> list[str]:
        """Name the parameters that have not come."""
        return sorted(name for names in self._waiting for name in names)

    def largest_gradients(self) -> dict[str, Tensor]:
        """Return the norm of each gradient of the first step, which is 0 where its largest magnitude is; asked once."""
        norms_of_first, self._norms = self._norms or {}, None
        return norms_of_first

    @torch.no_grad()
    def _update(self, names: list[str]) -> None:
        master_weights = self._master_weights
        gradients = master_weights.gradients(names)
        if self._ranks.size > 1:  # they come here in the same order: they run the same graph
            for work in [dist.all_reduce(gradient, dist.ReduceOp.SUM, async_op=True) for gradient in gradients]:
                work.wait()
        norms_of_parts = norms(gradients)
        part_norms = torch.stack(norms_of_parts)
        if self._norms is not None:
            self._norms |= dict(zip(names, norms_of_parts))
        # the global norm is known when all parts are done: it is reported, not clipped by
        self._squares.append(part_norms.square().sum())
        assert self._skipped is not None
        # one bad part stops the parts that come after it
        self._skipped = torch.maximum(self._skipped, torch.isfinite(part_norms).all().logical_not().float())
        if self._max_norm > 0:
            for name, factor in zip(names, (self._max_norm / (part_norms + 1e-6)).clamp(max=1.0).unbind()):
                master_weights.multiply(name, factor)
        skipped = self._skipped
        if may_step(self._optimizer, skipped):
            master_weights.step_part(names, lambda optimizer: step(optimizer, skipped))
        else:
            master_weights.clear(names)

    @torch.no_grad()
    def finish(self, loss: Callable[[], Tensor]) -> Updated:
        """Return what the backward has done. skipped: 1.0 where any parameter was left as it is."""
        self._armed = False
        self._master_weights.clear()
        assert self._skipped is not None
        return Updated(torch.stack(self._squares).sum().sqrt(), self._skipped)


def parts_of(groups: list[Group], count: int | None) -> list[list[str]]:
    """Cut parameters into what is updated together: each alone, or about `count` runs as kohya cuts them.

    A run holds ceil(all / count) parameters, and ends where the learning rate changes; so there may be more.
    """
    if count is None:
        return [[name] for group in groups for name, _ in group.named_params]
    rates = {name: group.lr for group in groups for name, _ in group.named_params}
    return list(runs(rates, math.ceil(len(rates) / count), kind=rates.__getitem__))
