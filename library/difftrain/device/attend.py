"""The one attention function: fused on NPU where the documented limits allow, torch's SDPA elsewhere."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from difftrain.device import host

if TYPE_CHECKING:
    from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 768
_MAX_HEADS = 256
_LEFT_UP_CAUSAL = 2  # sparse_mode: query i sees keys 0..i, given as one compressed upper triangle
_COMPRESSED = 2048

_tally: Counter[str] | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    fused: bool = True,
) -> Tensor:
    """Attend: softmax(q k^T scale) v.

    Shapes: q (B, N, S, D), k and v (B, N or a divisor of N, L, D), mask broadcastable to (B, N, S, L), out as q.
    mask: bool, True = keep, or None. causal: query i sees keys 0..i. scale: 1 / sqrt(D) where None.
    fused: False keeps an NPU on SDPA.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"attention takes a bool mask (True = keep), got {mask.dtype}")
    if fused and q.device.type == "npu" and why_not_fused(q, k, v) is None:
        _count("fused")
        return run_fused(_npu_operator(), q, k, v, mask, causal, scale)
    _count("sdpa")
    if causal and mask is not None:  # SDPA takes one or the other
        mask, causal = mask & causal_keep(q.shape[-2], k.shape[-2], q.device), False
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def why_not_fused(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why npu_fusion_attention cannot take these tensors, or None where it can.

    The only place that decides. Source: the limits of torch_npu's operator (spec of CANN 7.0 and later).
    """
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}"
    if q.dtype not in _HALF and not (q.dtype == torch.float32 and takes_fp32()):
        return f"{str(q.dtype).removeprefix('torch.')} is not taken by the fused operator of CANN {host.cann_version()}"
    if q.shape[-1] != k.shape[-1] or v.shape[-1] > q.shape[-1]:
        return f"head sizes {q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]}: q and k must be equal, v no larger"
    if not 1 <= q.shape[-1] <= _MAX_HEAD_DIM:
        return f"head size {q.shape[-1]} is above {_MAX_HEAD_DIM}"
    if not 1 <= q.shape[1] <= _MAX_HEADS or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads over {k.shape[1]}: at most {_MAX_HEADS}, and a multiple"
    return None


@functools.cache
def takes_fp32() -> bool:
    """Tell whether the CANN at hand fuses fp32 attention: 8 and later do, 7 did not."""
    version = host.cann_version()
    return version is not None and version.split(".")[0].isdecimal() and int(version.split(".")[0]) >= 8


def run_fused(
    operator: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Call npu_fusion_attention, whose mask is the opposite of SDPA's: True = masked OUT, full size, never broadcast."""
    sparse_mode, out_mask = 0, None
    if mask is not None:
        keep = mask & causal_keep(q.shape[-2], k.shape[-2], q.device) if causal else mask
        out_mask = expand_mask(keep, q, k).logical_not()
    elif causal:  # without a mask the operator ignores sparse_mode and attends to everything
        sparse_mode, out_mask = _LEFT_UP_CAUSAL, _compressed_triangle(q.device)
    return operator(
        q,
        k,
        v,
        q.shape[1],
        "BNSD",
        atten_mask=out_mask,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        keep_prob=1.0,
        sparse_mode=sparse_mode,
    )[0]


def expand_mask(keep: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Expand a broadcastable mask to one of the operator's shapes: (S, L), (1, 1, S, L), (B, 1, S, L), (B, N, S, L)."""
    size = (q.shape[-2], k.shape[-2])
    if keep.ndim == 2:
        return keep.expand(size)
    if keep.ndim == 3:
        keep = keep.unsqueeze(0)
    batch, heads = keep.shape[:2]
    if heads > 1:
        batch, heads = q.shape[0], q.shape[1]
    return keep.expand(batch, heads, *size)


def causal_keep(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the lower triangle, aligned at the upper left as SDPA's is_causal is."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


@functools.cache
def _compressed_triangle(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for ever, and training may be the second to ask
        return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)


@functools.cache
def _npu_operator() -> Callable[..., Any]:
    import torch_npu

    return torch_npu.npu_fusion_attention


def _count(kind: str) -> None:
    if _tally is not None:
        _tally[kind] += 1


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls by the path they took, "fused" or "sdpa", while the context is open."""
    global _tally
    before, _tally = _tally, Counter()
    try:
        yield _tally
    finally:
        _tally = before
