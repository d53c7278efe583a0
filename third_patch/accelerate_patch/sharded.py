"""`Accelerator.prepare(model, optimizer)` with fairscale's OSS: ShardedDDP around the model, and a scaler that agrees.

Upstream asks OSS for its whole state to move it, which raises, since no rank holds it; around the model it would put
DistributedDataParallel, which keeps every gradient on every rank; its gradient scaler decides on each rank alone; and of
the weights of a saved state it would leave out most, taking them for one. Model and optimizer come together, because
ShardedDDP asks the optimizer who owns what; a schedule may come with them or later.
The scale begins where the scaler that accelerate has made begins, whatever that is (GradScalerKwargs(init_scale=128.)).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import nn

from ..patching import Change

_prepare, _get_state_dict = Accelerator.prepare, AcceleratedOptimizer.state_dict


@wraps(_prepare)
def prepare(self: Accelerator, *args: Any, device_placement: list[bool] | None = None) -> Any:
    """Prepare; an OSS among the arguments is wrapped with its model, the rest as ever."""
    sharding = [each for each in args if is_oss(each)]
    if not sharding:
        return _prepare(self, *args, device_placement=device_placement)
    models = [each for each in args if isinstance(each, nn.Module)]
    if len(models) != 1 or len(sharding) != 1:
        raise ValueError(
            f"fairscale's OSS is prepared together with its one model; got {len(models)} models and {len(sharding)} of it"
        )
    made = {id(models[0]): wrap(self, models[0], sharding[0])}
    made[id(sharding[0])] = take(self, sharding[0])
    rest = [each for each in args if id(each) not in made]
    if rest:
        prepared = _prepare(self, *rest)
        made |= zip((id(each) for each in rest), prepared if len(rest) > 1 else (prepared,))
    return tuple(made[id(each)] for each in args)


def is_oss(candidate: Any) -> bool:
    """Tell whether something is an OSS, without importing fairscale for those who have none."""
    module = sys.modules.get("fairscale.optim.oss")
    return module is not None and isinstance(candidate, module.OSS)


def wrap(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> nn.Module:
    """Put ShardedDDP around a model that is on its device; accelerate's own precision is applied to it first."""
    from fairscale.nn.data_parallel import ShardedDataParallel

    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if not any(id(each) in held for each in prepared.parameters()):
        raise ValueError("OSS holds none of this model's parameters: make it when the model is on its device")
    handler = accelerator.ddp_handler
    wrapped = ShardedDataParallel(prepared, optimizer, broadcast_buffers=handler is None or handler.broadcast_buffers)
    accelerator._models[-1] = wrapped
    accelerator.register_save_state_pre_hook(save_apart)
    accelerator.register_load_state_pre_hook(load_apart)
    return wrapped


def save_apart(models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
    """Let every weight be saved: OSS lays them into one buffer, and of tensors that share one accelerate keeps the first."""
    for state in weights:
        state |= {name: tensor.detach().clone() for name, tensor in state.items()}


def load_apart(models: list[nn.Module], folder: str) -> None:
    """Load weights into that buffer, of all models, as accelerate numbers them; it has nothing left to load then."""
    for place, model in enumerate(models):
        number = f"_{place}" if place else ""
        path = Path(folder) / f"{SAFE_MODEL_NAME}{number}.safetensors"
        pickled = Path(folder) / f"{MODEL_NAME}{number}.bin"
        state = load_file(path) if path.exists() else torch.load(pickled, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    models.clear()


def take(accelerator: Accelerator, optimizer: Any) -> AcceleratedOptimizer:
    """Wrap the optimizer as accelerate does, with a scaler whose ranks agree, and without asking for its state."""
    if accelerator.scaler is not None:
        accelerator.scaler = agreeing(accelerator.scaler, accelerator.device.type)
    prepared = AcceleratedOptimizer(optimizer, device_placement=False, scaler=accelerator.scaler)
    prepared._is_accelerate_prepared = True
    accelerator._optimizers.append(prepared)
    return prepared


def agreeing(scaler: torch.amp.GradScaler, kind: str) -> Any:
    """Return fairscale's scaler with the settings of another: where that one begins, this one does."""
    from fairscale.optim.grad_scaler import ShardedGradScaler

    return ShardedGradScaler(
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        device=kind,
    )


def state_dict(self: AcceleratedOptimizer) -> dict[str, Any]:
    """Return the whole state; of a sharding optimizer all ranks gather it, as they all come here in save_state."""
    if is_oss(self.optimizer):
        return self.optimizer.state_dict(all_ranks=True)
    return _get_state_dict(self)


def changes() -> Iterator[Change]:
    """Yield what is replaced."""
    yield Accelerator, "prepare", prepare
    yield AcceleratedOptimizer, "state_dict", state_dict
