"""OSS, the optimizer that shards its state: gradients stay in their buckets, rates arrive at once, any device.

- zero_grad(set_to_none=True), torch's default since 2.0, takes a gradient out of the bucket of ShardedDDP. The next
  backward makes a new one that no reduction sees, and from the third step on each rank trains on its own samples, without
  an error (8e-3 off after 20 steps of a small model; 0.0 with this).
- The groups of the inner optimizer follow those outside in step() only. A schedule that steps after the update leaves
  the old rate there until the next one, where a checkpoint of the inner optimizer or a log finds it.
- Before the broadcast of updated parameters OSS waits for CUDA alone. Other devices had no order at all; there is one
  where the broadcast begins: collectives wait for the stream that they are called in. So no host waits here.
- State that is consolidated travels as pickled tensors, which on an accelerator come out on the sender's device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fairscale.optim.oss import OSS
from torch.optim import Optimizer

from ..patching import Change

_HALF = torch.float16


class Linked(dict[str, Any]):
    """A parameter group outside, whose inner group follows every change, but for the parameters."""

    def __init__(self, group: dict[str, Any], inner: dict[str, Any]) -> None:
        super().__init__(group)
        self.inner = inner

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "params":
            self.inner[key] = value

    def update(self, *others: Any, **named: Any) -> None:
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> Linked:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles are plain groups
        return dict, (dict(self),)


def _link(optimizer: OSS) -> None:
    pairs = zip(optimizer.param_groups, optimizer.optim.param_groups)
    optimizer.param_groups = [Linked(outer, inner) for outer, inner in pairs]


_refresh_trainable, _load_state_dict, _add_param_group = OSS.refresh_trainable, OSS.load_state_dict, OSS.add_param_group


def refresh_trainable(self: OSS) -> None:
    """Partition anew, and tie the groups; ShardedDDP calls it again where something is frozen."""
    _refresh_trainable(self)
    _link(self)


def load_state_dict(self: OSS, state_dict: dict[str, Any]) -> None:
    """Load, which makes new groups, and tie them."""
    _load_state_dict(self, state_dict)
    _link(self)


def add_param_group(self: OSS, param_group: dict[str, Any]) -> None:
    """Add a group, and tie it."""
    _add_param_group(self, param_group)
    if not self.in_super_constructor:
        _link(self)


def zero_grad(self: OSS, set_to_none: bool = True) -> None:
    """Zero gradients where they are: they are views of buckets, whatever the caller asks for."""
    Optimizer.zero_grad(self, set_to_none=False)


@torch.no_grad()
def broadcast_params(self: OSS) -> None:
    """Send every rank's parameters to all, in the order of the device's stream."""
    sent = []
    for buckets in self.buckets.values():
        for owner, bucket in buckets.items():
            message = bucket.buffer.to(_HALF) if self.broadcast_fp16 else bucket.buffer
            source = self._local_to_global_rank[owner]
            sent.append((bucket.buffer, message, dist.broadcast(message, source, group=self.group, async_op=True)))
    for buffer, message, work in sent:
        work.wait()
        if message is not buffer:
            buffer.copy_(message)


def consolidate_state_dict(self: OSS, recipient_rank: int = 0) -> None:
    """Gather every rank's state, on the host. recipient_rank: who keeps it; -1: all."""
    OSS._sync_param_groups(self.param_groups, self.optim.param_groups)
    keeps = recipient_rank in (-1, self.rank)
    mine = _on_host(self.optim.state_dict())
    self._all_states = []
    for rank in range(self.world_size):
        box = [mine if rank == self.rank else None]
        dist.broadcast_object_list(box, src=self._local_to_global_rank[rank], group=self.group)
        if keeps:
            self._all_states.append(mine if rank == self.rank else box[0])


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(each) for each in value)
    return value


def changes() -> Iterator[Change]:
    """Yield what is replaced."""
    yield OSS, "refresh_trainable", refresh_trainable
    yield OSS, "load_state_dict", load_state_dict
    yield OSS, "add_param_group", add_param_group
    yield OSS, "zero_grad", zero_grad
    yield OSS, "_broadcast_params", broadcast_params
    yield OSS, "consolidate_state_dict", consolidate_state_dict
