"""Memory of one step of a family, forward and backward, found by a pass over tensors without content.

The pass is the trained one: recomputed where checkpoints of activations ask for it, cast as mixed precision casts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from difftrain.contracts import METRIC, Bucket
from difftrain.device.step_memory import AcceleratorMaths, CountMemory
from difftrain.models.flops import blank_inputs
from difftrain.models.placeholder import DTYPES

if TYPE_CHECKING:
    from torch import nn

    from difftrain.models.base import BaseFamily


def step_peak(
    family: BaseFamily, root: nn.Module, bucket: Bucket, batch: int, freed: Callable[[nn.Module], object] | None = None
) -> int:
    """Return the most bytes that forward and backward of a micro batch take at once; see step_peaks."""
    return step_peaks(family, root, bucket, batch, freed)[0]


def step_peaks(
    family: BaseFamily, root: nn.Module, bucket: Bucket, batch: int, freed: Callable[[nn.Module], object] | None = None
) -> tuple[int, int]:
    """Return the most bytes that a micro batch takes at once, beside weights and optimizer, and the most of its backward pass.

    Gradients, casts of autocast, activations and what the backward pass makes on its way are in it; text encoders and VAE
    that run in each step are not: they come before. root: on the meta device, in the dtypes that it is trained in; its
    gradients are left there. freed: sets hooks that take gradients away during the backward pass.
    """
    # --- a step without content: blank inputs, gradients as accumulation leaves them
    training, precision = family.cfg.training, family.cfg.training.mixed_precision
    maths = AcceleratorMaths(None if precision == "no" else DTYPES[precision])
    inputs = blank_inputs(family, bucket, batch=batch)
    root.train()
    _recompute_with(root, maths, offloads=training.cpu_offload_checkpointing)
    if freed is not None:
        freed(root)
    if training.accumulation > 1:  # gradients of earlier micro batches are there: what adds to them comes and goes
        for param in root.parameters():
            param.grad = torch.empty_like(param) if param.requires_grad else None

    # --- forward and backward, counted
    with CountMemory() as memory:
        with maths:
            outputs = family.forward(root, inputs)
        maths.forget()
        terms = family.loss_sums(tuple(output.float() for output in outputs), inputs)
        loss = torch.stack([value for name, value in terms.items() if not name.startswith(METRIC)]).sum()
        del outputs, terms
        forward, memory.peak = memory.peak, memory.now
        loss.backward()
    standing = sum(_bytes(param.grad) for param in root.parameters()) if training.accumulation > 1 else 0
    return max(forward, memory.peak) + standing, memory.peak + standing


def _away(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _back(kept: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
    return torch.empty(kept[0], dtype=kept[1], device="meta")


def _recompute_with(root: nn.Module, maths: AcceleratorMaths, *, offloads: bool = False) -> None:
    """Compute again under the same casts: inside the backward pass no mode of functions is on.

    offloads: what is kept waits on the host, and takes nothing of the device meanwhile.
    """

    def again(function: Any, *args: Any, **kwargs: Any) -> Any:
        def cast(*args: Any, **kwargs: Any) -> Any:
            try:
                with maths:
                    return function(*args, **kwargs)
            finally:  # autocast is entered anew in the backward pass, and left as soon as all is there that was asked for
                if torch._C._current_graph_task_id() != -1:
                    maths.forget()

        with saved_tensors_hooks(_away, _back) if offloads else nullcontext():
            return checkpoint(cast, *args, use_reentrant=False, **kwargs)

    module: Any
    for module in root.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = again


def _bytes(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.numel() * value.element_size()
