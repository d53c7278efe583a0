"""fairscale's OSS and ShardedDDP through accelerate: every rank keeps the gradients and the state of its own parameters.

third_patch mends both and teaches accelerate to prepare them; the doors apply it before anything is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.utils import clip_grads_with_norm_

from difftrain.contracts import Batch, Group
from difftrain.distributed.groups import RankGroup
from difftrain.engine.accelerate import AccelerateEngine, make_accelerator
from difftrain.engine.base import MakeOptimizer
from difftrain.engine.gradients import Arrivals
from difftrain.engine.master_weights import MasterWeights
from difftrain.optim import inner

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from difftrain.distributed.ranks import Ranks


class ShardedEngine(AccelerateEngine):
    """Reduce each gradient to the one rank that updates its parameter, and send the parameter back."""

    sees_gradients = False  # what this rank has of others' is no sum

    def faults(self) -> list[str]:
        """Say what is asked and cannot be done."""
        from accelerate import Accelerator
        from fairscale.optim import OSS

        problems = super().faults()
        if not hasattr(Accelerator.prepare, "__wrapped__") or "zero_grad" not in vars(OSS):
            problems.append('fairscale and accelerate are not patched: call third_patch.apply_for("accelerate", "oss")')
        return problems

    def _make_master_weights(self) -> MasterWeights:
        return ShardedMasterWeights(self._trained)

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        self.accelerator = make_accelerator(self.cfg.training, self.device, self.root)
        self.accelerator.scaler = self._scaler
        optimizer = as_oss(self._optimizer_for(groups, make_optimizer))
        wrapped, _ = self.accelerator.prepare(self.root, optimizer)
        wrapped._world_size_scaling = 1.0  # it would average
        self._wrapped, self._scaler = wrapped, self.accelerator.scaler
        return optimizer


def as_oss(optimizer: Optimizer) -> Any:
    """Make fairscale's OSS of an optimizer that is new, sharded by torch or not: the same class, groups and settings."""
    from fairscale.optim import OSS

    worker = inner(optimizer)
    taken = inspect.signature(type(worker)).parameters
    settings = {key: value for key, value in worker.defaults.items() if key in taken}
    return OSS([dict(group) for group in optimizer.param_groups], optim=type(worker), **settings)


class ShardedMasterWeights(MasterWeights):
    """Gradients are this rank's share; what is known of all of them takes an exchange, on every rank alike."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__(weights)
        self._arrivals = Arrivals(weights)

    def attach(self, optimizer: Optimizer, ranks: Ranks) -> None:
        """Learn which parameters are this rank's."""
        super().attach(optimizer, ranks)
        self._own_params = [param for group in inner(optimizer).param_groups for param in group["params"]]

    def for_scaler(self) -> Any:
        """Return the inner optimizer, which holds this rank's parameters alone."""
        return inner(self.optimizer)

    def gradients(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """Return the reduced gradients that this rank updates with."""
        assert names is None, "all at once"
        return [weight.grad for weight in self._own_params if weight.grad is not None]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all ranks: of the norms of their shares."""
        device = next(iter(self.weights.values())).device
        return RankGroup(None, device).norm(super().norm(gradients) if gradients else None, device)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale this rank's gradients down where the norm of all is above max_norm."""
        clip_grads_with_norm_(self._own_params, max_norm, norm)

    def missing_gradients(self) -> list[str]:
        """Name the weights that no backward has reached; asked once, after the first step."""
        return self._arrivals.missing()

    def clear(self, names: Iterable[str] | None = None) -> None:
        """Zero gradients where they are: they are views of the buckets that are reduced."""
        self.optimizer.zero_grad()
