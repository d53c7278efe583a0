"""What a step takes of a device's memory, counted without the device: the very step on tensors that have no content.

1. `CountMemory` counts the bytes of every tensor that is alive, and their peak, as a caching allocator would.
2. `AcceleratorMaths` casts as an accelerator's autocast does and attends as its fused kernels do: they keep no scores.

Not counted: the driver's context, workspaces of libraries, fragmentation.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_BLOCK = 512  # bytes: allocators round up to it


class CountMemory(TorchDispatchMode):
    """Count the bytes of storages that come about inside, for as long as they live. What is there before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in map(_storage, tree_leaves((args, kwargs))) if storage is not None}
        made = func(*args, **(kwargs or {}))
        for storage in map(_storage, tree_leaves(made)):
            # an output that shares an input's storage is a view, or written in place
            if storage is not None and storage._cdata not in before and storage._cdata not in self._alive:
                self._count(storage)
        return made

    def _count(self, storage: Any) -> None:
        size, key = -(-storage.nbytes() // _BLOCK) * _BLOCK, storage._cdata

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storage(value: Any) -> Any:
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None


# --- What an accelerator's autocast casts, by the names of the functions. Source: torch's page "Automatic Mixed
# Precision", CUDA; torch_npu follows it. What is named nowhere computes in the widest dtype that it is given.
_TO_HALF = frozenset((
    "__matmul__", "__rmatmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm", "mv",
    "scaled_dot_product_attention",
))  # fmt: skip
_TO_FP32 = frozenset((
    "__pow__", "__rpow__", "cosine_similarity", "cross_entropy", "cumsum", "exp", "group_norm", "l1_loss", "layer_norm",
    "log", "log_softmax", "mse_loss", "norm", "normalize", "pow", "prod", "reciprocal", "rsqrt", "smooth_l1_loss",
    "softmax", "softplus", "sum",
))  # fmt: skip


class AcceleratorMaths(TorchFunctionMode):
    """Cast as autocast of a half precision does, None: not at all; attend as fused kernels do.

    Weights are cast once, and kept until `forget`, as autocast keeps them until its end.
    """

    def __init__(self, half: torch.dtype | None) -> None:
        super().__init__()
        self.half = half
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # weights by id, kept so that none is used twice

    def forget(self) -> None:
        """Let go of the casts of weights; what the backward pass needs of them it holds itself."""
        self._casts.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.half is not None and name in _TO_HALF:
            args, kwargs = tree_map(self._to_half, (args, kwargs))
        elif self.half is not None and name in _TO_FP32:
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
        if name == "scaled_dot_product_attention":
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _to_half(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.half)
        if id(value) not in self._casts:
            self._casts[id(value)] = value, value.to(self.half)
        return self._casts[id(value)][1]


def _to_fp32(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def _attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    # torch makes of a bool mask one that is added to the scores, in their dtype
    added = attn_mask is None or attn_mask.dtype != torch.bool
    return _FusedAttention.apply(query, key, value, attn_mask if added else attn_mask.to(query.dtype))


class _FusedAttention(torch.autograd.Function):
    """Shapes and memory of fused attention: q, k, v, a mask, the output and a logarithm a row are kept, no scores."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, rows, *(() if mask is None else (mask,)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
