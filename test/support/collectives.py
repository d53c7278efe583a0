"""Collectives of a process, counted where every one passes: the operators of c10d, with their payloads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operator -> (kind, number of the argument whose bytes are the whole payload)
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "send": ("point_to_point", 0),
}
_SILENT = {
    "recv_",
    "recv_any_source_",
    "barrier",
    "monitored_barrier_",
}  # what sends no payload, or is counted by its sender


class CollectiveCount(TorchDispatchMode):
    """Count payloads in bytes by kind of collective and size of its group; small ones are the engine's own figures."""

    def __init__(self) -> None:
        super().__init__()
        self.payload: Counter[tuple[str, int]] = Counter()
        self.calls: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator and run it."""
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name not in _SILENT:
            kind, at = _KINDS[name]  # an operator that is not known is an error
            given = (*args, *(kwargs or {}).values())
            groups = [
                value
                for value in given
                if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
            ]
            size = torch.distributed.ProcessGroup.unbox(groups[0]).size()
            tensors = [leaf for leaf in tree_leaves(args[at]) if isinstance(leaf, torch.Tensor)]
            self.payload[kind, size] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.calls[kind, size] += 1
        return func(*args, **(kwargs or {}))
