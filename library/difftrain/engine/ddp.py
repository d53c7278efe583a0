"""DistributedDataParallel that sums: gradients are never averaged, because the loss is divided by the global count."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.
import atexit
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from difftrain.contracts import Batch, FeatureSpec
from difftrain.device import patches, quantised

if TYPE_CHECKING:
    from difftrain.config.schema.sections import TrainingSection
    from difftrain.device import Device

# The reducer rebuilds its buckets in the order in which gradients came, between the first backward and the second
# forward. From then on the order of sums is fixed, so a resumed process must get there before its first step.
WARM_PASSES = 2


def sum_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over the ranks; DDP's own reduction would divide by their number."""
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.SUM, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def wrap(
    root: nn.Module, device: "Device", section: "TrainingSection", base: Collection[str] = ()
) -> DistributedDataParallel:
    """Wrap the root; parameters keep their names inside. base: names that are never sent."""
    leave_out_frozen(root, base)
    lay_out(root)
    wrapped = DistributedDataParallel(
        root,
        device_ids=None if device.torch_device.index is None else [device.torch_device.index],
        **buffers(root),
        gradient_as_bucket_view=section.ddp_bucket_view,
        static_graph=section.ddp_static_graph,
    )
    wrapped.register_comm_hook(None, sum_hook)
    return wrapped


def leave_out_frozen(root: nn.Module, base: Collection[str] = ()) -> None:
    """Let DDP pass over what is frozen: held in 8 bits, which cannot be sent, or read by every rank from its source."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, [*quantised.stored_names(root), *base])


def lay_out(root: nn.Module) -> None:
    """Lay parameters out in order, in place: buckets, gradients and moments then have the same strides.

    A parameter that is a slice of another tensor has strides that its gradient cannot have; its bucket is copied where
    it could be viewed, and on NPU such copies converged slowly (Ascend/pytorch issue 17).
    """
    if patches.on("ddp_strides"):
        make_contiguous(root)


def make_contiguous(root: nn.Module) -> None:
    """Lay parameters out in order, in place."""
    for parameter in root.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)


def buffers(root: nn.Module) -> dict[str, Any]:
    """Return what keeps DDP from sending buffers that never change; newer versions of torch call it otherwise."""
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {} if has_statistics(root) else {name: False}


def has_statistics(root: nn.Module) -> bool:
    """Tell whether a module keeps running statistics; constants, which need no sending, are in no state dict."""
    parameters = {name for name, _ in root.named_parameters()}
    return any(name not in parameters for name in root.state_dict())


def warm_up(root: nn.Module, batch: Batch, backward: Callable[[Batch], None]) -> None:
    """Run the dummy passes on a real batch; weights, buffers and statistics are as before."""
    with kept_buffers(root):
        for _ in range(WARM_PASSES):
            backward(batch)
    for parameter in root.parameters():
        parameter.grad = None


@contextmanager
def kept_buffers(root: nn.Module) -> Iterator[None]:
    """Put buffers back as they were, running statistics among them."""
    stored = {*quantised.stored_names(root)}  # never changes, and may be without memory
    kept = [(buffer, buffer.detach().clone()) for name, buffer in root.named_buffers() if name not in stored]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def as_evaluated(batch: Batch, features: FeatureSpec) -> Batch:
    """Return a batch of training as one of evaluation: without what makes a forward go another way in training."""
    draws = {name: value for name, value in batch.draws.items() if not features.draws[name].trains}
    return replace(batch, draws=draws, step=None)


def one_process_group(device: "Device") -> None:
    """Make a process group of this process alone, where there is none, for what has no way without one."""
    if not dist.is_initialized():
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
