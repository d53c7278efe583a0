"""The native engine: one process, or DistributedDataParallel over the ranks, optimizer state whole or sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, ConfigFault, Fault, Group
from difftrain.engine import ddp
from difftrain.engine.base import MakeOptimizer
from difftrain.engine.checkpointing import CheckpointedEngine
from difftrain.engine.fused import DuringBackward, parts_of

if TYPE_CHECKING:
    from difftrain.engine.update import Update


class NativeEngine(CheckpointedEngine):
    """Let torch wrap: DistributedDataParallel that sums, or nothing for one process and for updates in the backward."""

    name = "native"

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        if self.ranks.size > 1 and not self._fused:
            self._wrapped = ddp.wrap(self.root, self.device, self.cfg.training, self.parts.base)
            ddp.warm_up(self.root, warm[0], self._dummy_backward)
        return self._optimizer_for(groups, make_optimizer)

    @property
    def _fused(self) -> bool:
        return self.cfg.optimizer.fused_backward or self.cfg.optimizer.fused_groups is not None

    def _make_update(self, groups: list[Group]) -> Update:
        if not self._fused:
            return super()._make_update(groups)
        if self.ranks.size > 1 and ddp.has_statistics(self.root):
            what = "has running statistics, which ranks can only share when updates follow the backward pass"
            remedy = f"leave {option('optimizer.fused_backward', True)} and {option('optimizer.fused_groups')} out"
            raise ConfigFault([Fault("model", what, remedy)])
        parts = parts_of(groups, self.cfg.optimizer.fused_groups)
        max_norm = self.cfg.training.max_grad_norm
        return DuringBackward(self._master_weights, parts, self.ranks, max_norm)
