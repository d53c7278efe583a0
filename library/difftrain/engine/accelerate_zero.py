"""DeepSpeed's ZeRO through accelerate's plugin.

DeepSpeed scales the loss, reduces, clips and updates; in mixed precision it keeps half weights with fp32 values beside
them. What it averages is multiplied back, and a step whose loss is not finite it meets as gradients that are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from difftrain.contracts import Batch, Group
from difftrain.engine.accelerate import (
    AccelerateEngine,
    make_accelerator,
    make_plugin,
    one_process_group,
    unsupported,
    without_launcher_env,
)
from difftrain.engine.accelerate_zero_state import LossScale, ZeroMasterWeights, ZeroState
from difftrain.engine.base import MakeOptimizer
from difftrain.engine.ddp import as_evaluated
from difftrain.engine.master_weights import DTYPES, MasterWeights
from difftrain.engine.update import Update, Updated
from difftrain.optim.state import NamedState

if TYPE_CHECKING:
    from torch import Tensor


class ZeroEngine(AccelerateEngine):
    """Let every rank hold a part of the optimizer's state, of the gradients, and of the weights, as the stage says."""

    repeats = sees_gradients = False  # weights, gradients or both lie in pieces on the ranks

    def faults(self) -> list[str]:
        """Say what is asked and cannot be done; touches no device."""
        return [*super().faults(), *unsupported(self.cfg, self.device)]

    def _move_root(self) -> None:
        """Bring the root to the device, or only this rank's parts of it."""
        one_process_group(self.device)
        root = self.root
        scale = self.device.scaler("fp16") if self.cfg.training.mixed_precision == "fp16" else None
        elements = sum(param.numel() for param in root.parameters())
        self._plugin = make_plugin(self.cfg, self.dp_size, elements, 1.0 if scale is None else scale.get_scale())
        self._env = {
            "RANK": str(self.ranks.rank),
            "WORLD_SIZE": str(self.dp_size),
            "LOCAL_RANK": str(self.ranks.local_rank),
            "ACCELERATE_TORCH_DEVICE": str(self.device.torch_device),
        }
        self.accelerator = make_accelerator(self.cfg.training, self.device, root, self._plugin, **self._env)
        unset_hf_deepspeed_config()  # else transformers cuts every model that is made from here on, an export's too
        if not self.cfg.deepspeed.zero3_init:
            super()._move_root()
            return
        from deepspeed import zero

        dtype = DTYPES.get(self.cfg.training.mixed_precision, torch.float32)
        for parameter in root.parameters():
            if parameter.is_floating_point():  # codes of weights in few bits stay integers
                parameter.data = parameter.detach().to(dtype)
        for buffer in root.buffers():
            buffer.data = buffer.to(self.device.torch_device)
        zero.Init(module=root, config_dict_or_path=self._plugin.deepspeed_config, dtype=dtype)

    def _make_master_weights(self) -> MasterWeights:
        self._zero_weights = ZeroMasterWeights(self._trained, self.root, self.cfg.deepspeed.zero_stage)
        return self._zero_weights

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        if self.cfg.deepspeed.zero_stage == 3 and self.dp_size > 1:
            self._spare = [as_evaluated(batch, self.family.features) for batch in warm]
        made = self._optimizer_for(groups, make_optimizer)
        self._kind = NamedState(made, {}).kind  # offloaded, it becomes one of DeepSpeed's, with the same state
        with without_launcher_env(self._env):
            self._wrapped, _ = self.accelerator.prepare(self.root, made)
        zero = self._wrapped.optimizer
        self._zero_weights.bind(zero)
        self._scaler = LossScale(zero.loss_scaler) if self.cfg.training.mixed_precision == "fp16" else None  # type: ignore[assignment]
        return zero.optimizer

    def _make_update(self, groups: list[Group]) -> Update:
        self._zero_update = ZeroUpdate(self._wrapped, self._zero_weights)
        return self._zero_update

    def _make_state(self) -> ZeroState:
        return ZeroState(self.optimizer, self._kind, self._zero_weights)

    def _backward(self, loss: Tensor) -> None:
        # DeepSpeed divides by the number of ranks; scale_wrt_gas would divide by the micro batches
        self._wrapped.backward(loss * self.dp_size * self._zero_update.factor, scale_wrt_gas=False)

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        """Tell DeepSpeed that more micro batches follow; from stage 2 on it reduces each one all the same."""
        self._wrapped.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._wrapped.set_gradient_accumulation_boundary(True)


class ZeroUpdate(Update):
    """Let DeepSpeed unscale, clip and update, or skip what is not finite, which all ranks see alike."""

    needs_loss = True

    def __init__(self, engine: Any, master_weights: ZeroMasterWeights) -> None:
        super().__init__(master_weights)
        self._engine = engine
        self.factor: Tensor | float = 1.0

    def ready(self, loss: Callable[[], Tensor]) -> None:
        """Carry a loss that is not finite into the last backward: x * 1 else."""
        self.factor = 1.0 + 0.0 * loss()

    @torch.no_grad()
    def finish(self, loss: Callable[[], Tensor]) -> Updated:
        """Update."""
        self.factor = 1.0
        self._engine.step()
        done = self._engine.was_step_applied()
        norm = self._engine.get_global_grad_norm() if done else float("inf")
        device = self._engine.device
        return Updated(
            torch.as_tensor(norm, dtype=torch.float32, device=device), torch.tensor(float(not done), device=device)
        )
