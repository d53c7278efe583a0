"""Making an Accelerator that wraps and does nothing else, whatever a launcher or an earlier one has left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from difftrain.engine import ddp

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config.sections import TrainingSection
    from difftrain.device import Device

_ITS_OWN = "ACCELERATE_"  # variables of accelerate's launcher: what counts is this package's configuration


def make_accelerator(section: TrainingSection, device: Device, root: nn.Module, plugin: Any = None, **env: str) -> Any:
    """Make an Accelerator for this device and the process group that is there. plugin: DeepSpeed's, which brings the
    precision. env: variables that count meanwhile.

    Otherwise precision is no matter of accelerate's: ours covers a batch's inputs too, and the loss scale begins where
    the device says.
    """
    with alone(env):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from accelerate.utils import (
            DistributedDataParallelKwargs,
            GradientAccumulationPlugin,
            InitProcessGroupKwargs,
        )

        AcceleratorState._reset_state(reset_partial_state=True)  # there may have been an engine before this one
        GradientState._reset_state()

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
def alone(env: Mapping[str, str]) -> Iterator[None]:
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
