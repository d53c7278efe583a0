"""The accelerate engine: DistributedDataParallel, fairscale's ShardedDDP, or DeepSpeed's ZeRO, as accelerate prepares them.

Of accelerate it takes the wrapping and nothing else. Gradients are summed, not averaged; there is one micro batch as far
as accelerate knows; schedules, precision, loss scale and checkpoints are the engine's own, in the one format.
"""

from __future__ import annotations

import os
from typing import Any

from difftrain.contracts import Batch, Group
from difftrain.engine import ddp
from difftrain.engine.accelerate_setup import make_accelerator
from difftrain.engine.base import MakeOptimizer
from difftrain.engine.checkpointing import CheckpointedEngine

# what `accelerate launch` sets for ways to train that this engine is not
_ELSEWHERE = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "its parallelism configuration",
}
_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"


class AccelerateEngine(CheckpointedEngine):
    """Let accelerate wrap: DistributedDataParallel for several ranks, nothing for one."""

    name = "accelerate"

    def faults(self) -> list[str]:
        """Say what is asked, also by accelerate's own launcher, and cannot be done; touches no device."""
        found = super().faults()
        for name, what in _ELSEWHERE.items():
            if _is_on(name):
                found.append(f"{name} asks accelerate for {what}, which this engine does not run: use another launcher")
        if _is_on(_DEEPSPEED) and not self.cfg.deepspeed.enable:
            found.append(f"{_DEEPSPEED} is set: give --deepspeed and its flags, accelerate's own file is not read")
        return found

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        self.accelerator = make_accelerator(self.cfg.training, self.device, self.root)
        self.accelerator.scaler = self._scaler
        ddp.leave_out_held(self.root)
        ddp.lay_out(self.root)
        self._wrapped = self.accelerator.prepare(self.root)
        if self.dp_size > 1:
            self._wrapped.register_comm_hook(None, ddp.sum_hook)  # in place of the mean
            ddp.warm_up(self.root, warm[0], self._dummy_backward)
        optimizer = self._optimizer_for(groups, make_optimizer)
        self.accelerator.prepare(optimizer, device_placement=[False])
        return optimizer


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes")
