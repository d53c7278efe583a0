"""The accelerate engine: DistributedDataParallel, fairscale's ShardedDDP, or DeepSpeed's ZeRO, as accelerate prepares them.

Of accelerate it takes the wrapping and nothing else. Gradients are summed, not averaged; there is one micro batch as far
as accelerate knows; schedules, precision, loss scale and checkpoints are the engine's own, in the one format.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, Group
from difftrain.engine import ddp
from difftrain.engine.base import MakeOptimizer
from difftrain.engine.checkpointing import CheckpointedEngine

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config import TrainConfig
    from difftrain.config.schema.sections import TrainingSection
    from difftrain.device import Device


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
        problems = super().faults()
        for name, what in _ELSEWHERE.items():
            if _is_on(name):
                other = f"{option('training.engine')}=fsdp does" if what == "FSDP" else "use another launcher"
                problems.append(f"{name} asks accelerate for {what}, which this engine does not support: {other}")
        if _is_on(_DEEPSPEED) and not self.cfg.deepspeed.enable:
            problems.append(f"{_DEEPSPEED} is set: give --deepspeed and its flags, accelerate's own file is not used")
        return problems

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        self.accelerator = make_accelerator(self.cfg.training, self.device, self.root)
        self.accelerator.scaler = self._scaler
        ddp.leave_out_frozen(self.root, self.parts.base)
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


# --- Making an Accelerator that wraps and does nothing else; kohya's DeepSpeed flags as the configuration of its plugin


_ITS_OWN = "ACCELERATE_"  # variables of accelerate's launcher: what counts is this package's configuration


def make_accelerator(section: TrainingSection, device: Device, root: nn.Module, plugin: Any = None, **env: str) -> Any:
    """Make an Accelerator for this device and the process group that is there. plugin: DeepSpeed's, which brings the
    precision. env: variables that count meanwhile.

    Otherwise precision is no matter of accelerate's: ours covers a batch's inputs too, and the loss scale begins where
    the device says.
    """
    with without_launcher_env(env):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from accelerate.utils import (
            DistributedDataParallelKwargs,
            GradientAccumulationPlugin,
            InitProcessGroupKwargs,
        )

        AcceleratorState._reset_state(reset_partial_state=True)  # there may have been an engine before this one
        GradientState._reset_state()

        # accelerate makes DDP from this object; what its dataclass has no field for goes in by to_kwargs
        class Wrapping(DistributedDataParallelKwargs):  # type: ignore[misc]
            """What DDP is told, with what accelerate has no field for."""

            def to_kwargs(self) -> dict[str, Any]:
                return {**super().to_kwargs(), **ddp.buffers(root)}

        handlers: list[Any] = [InitProcessGroupKwargs(backend=device.backend)] if plugin is not None else []
        made = Accelerator(
            mixed_precision=section.mixed_precision if plugin is not None else "no",
            cpu=device.module is None and plugin is None,  # with it accelerate would pass DeepSpeed over
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, adjust_scheduler=False),
            step_scheduler_with_optimizer=False,
            deepspeed_plugin=plugin,
            dynamo_backend="no",
            kwargs_handlers=handlers,
        )
        made.ddp_handler = Wrapping(
            gradient_as_bucket_view=section.ddp_bucket_view, static_graph=section.ddp_static_graph
        )
        return made


@contextmanager
def without_launcher_env(env: Mapping[str, str]) -> Iterator[None]:
    """Hide accelerate's variables for a while; what it sets itself, the number of threads too, is put back."""
    before, threads = dict(os.environ), torch.get_num_threads()
    for name in [name for name in before if name.startswith(_ITS_OWN)]:
        del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # else accelerate warns and takes a number of its own
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)


_SHARED_MEMORY = "deepspeed_shm_comm"
_BUCKET = 500_000_000  # DeepSpeed's own, in elements
_GROWTH_INTERVAL = 2000  # of torch's scaler


def _import_for(device: Device) -> None:
    """Import DeepSpeed so that it computes where this engine does; it decides then, and looks for CUDA first."""
    os.environ.setdefault("DS_ACCELERATOR", device.kind)
    import deepspeed

    if device.module is None:  # it would compile an all-reduce of its own, for a minute, at the first start
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    else:  # it measures gradients in fp64 on every device that does not deny it, and NPUs have no such norm
        deepspeed.accelerator.get_accelerator().is_fp64_supported = lambda: False
    warnings.filterwarnings("ignore", ".*torch.distributed.*is deprecated", FutureWarning)  # its calls, at every step


def unsupported(cfg: TrainConfig, device: Device) -> list[str]:
    """Say what DeepSpeed cannot do on this kind of device, or with what is installed."""
    _import_for(device)
    from deepspeed.accelerator import get_accelerator

    known, problems = get_accelerator(), []
    if known.device_name() != device.kind:
        problems.append(
            f"DeepSpeed computes on {known.device_name()} and this run on {device.kind}: unset DS_ACCELERATOR"
        )
    can = {"fp16": known.is_fp16_supported, "bf16": known.is_bf16_supported}.get(cfg.training.mixed_precision)
    if can is not None and not can():
        alternative = "bf16 or no" if cfg.training.mixed_precision == "fp16" else "no"
        problems.append(
            f"DeepSpeed has no {cfg.training.mixed_precision} on this {device.kind}: give {option('training.mixed_precision')}={alternative}"
        )
    if "nvme" in (cfg.deepspeed.offload_optimizer_device, cfg.deepspeed.offload_param_device):
        builder = known.create_op_builder("AsyncIOBuilder")
        if builder is None or not builder.is_compatible():
            problems.append("offloading to nvme needs the library libaio (package libaio-dev), which is not installed")
    return problems


def make_plugin(cfg: TrainConfig, dp_size: int, elements: int, start_scale: float) -> Any:
    """Make the plugin. elements: of the whole model; buckets are no larger. start_scale: of the loss, a power of two."""
    from accelerate.utils import DeepSpeedPlugin

    section, training = cfg.deepspeed, cfg.training
    plugin = DeepSpeedPlugin(
        hf_ds_config="none",  # not a file that the environment names
        gradient_accumulation_steps=1,
        gradient_clipping=training.max_grad_norm,
        zero_stage=section.zero_stage,
        offload_optimizer_device=section.offload_optimizer_device or "none",
        offload_optimizer_nvme_path=section.offload_optimizer_nvme_path or "none",
        offload_param_device=section.offload_param_device or "none",
        offload_param_nvme_path=section.offload_param_nvme_path or "none",
        zero3_init_flag=section.zero3_init,
        zero3_save_16bit_model=section.zero3_save_16bit,
    )
    config = plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = training.batch_size
    config["train_batch_size"] = training.batch_size * dp_size
    bucket = min(_BUCKET, max(elements, 1))
    config["zero_optimization"] |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if training.mixed_precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "auto_cast": False,  # autocast does, and leaves what must stay fp32
            "initial_scale_power": int(math.log2(start_scale)),
            "loss_scale_window": _GROWTH_INTERVAL,
            "hysteresis": 1,
            "fp16_master_weights_and_grads": section.fp16_master_weights,
        }
    return plugin


def one_process_group(device: Device) -> None:
    """Make a process group of this process alone, where there is none: DeepSpeed has no run without one."""
    _import_for(device)
    os.environ.setdefault("LOCAL_RANK", "0")  # which it reads at every step of ZeRO 3
    ddp.one_process_group(device)
