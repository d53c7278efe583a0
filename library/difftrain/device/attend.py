"""The one attention function: fused on NPU where the documented limits allow, torch's SDPA elsewhere.

A row of a mask that keeps nothing gives zeros, and no gradient, on every path: what torch's SDPA does.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from difftrain.device import counters, host

if TYPE_CHECKING:
    from torch import Tensor


_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 768
_MAX_HEADS = 256
_MAX_LENGTH = 1 << 20
# sparse_mode: the mask as it is given; or query i sees keys 0..i, given as one compressed upper triangle
_MASK, _LEFT_UP_CAUSAL = 0, 2
_COMPRESSED = 2048
_ZERO_EMPTY_ROWS = 2  # inner_precise: without it, a row that keeps nothing gives the mean of the values


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

    Shapes: q (B, N, S, D), k and v (B, N or a divisor of N, L, D), mask broadcastable to (B, N, S, L), out as q with
    v's D. mask: bool, True = keep, or None, which is faster than a mask that keeps all. causal: query i sees keys 0..i,
    also where S and L differ. scale: 1 / sqrt(D) where None. fused: False keeps an NPU on SDPA.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"attention takes a bool mask (True = keep), got {mask.dtype}")

    # other devices: SDPA has fused kernels of its own there
    if q.device.type != "npu":
        return unfused(q, k, v, mask, causal, scale, why=f"on {q.device.type}")

    # an NPU: SDPA for what the operator does not take, or where it is asked for
    q, k, v = _as_autocast(q, k, v)
    why = why_not_fused(q, k, v)
    if why is not None:
        return unfused(q, k, v, mask, causal, scale, why=why, formula=True)
    if not fused:
        mask = None if mask is None else expand_mask(mask, q, k)  # the kernel behind SDPA broadcasts none
        return unfused(q, k, v, mask, causal, scale, why="as asked for")

    # all else is fused
    count(None)
    return run_fused(_npu_operator(), q, k, v, mask, causal, scale)


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    *,
    why: str,
    dropout: float = 0.0,
    formula: bool = False,
) -> Tensor:
    """Attend by torch's SDPA, which picks the device's fastest kernel; counted with its reason.

    mask: bool, True = keep; or float, added to the scores. formula: keep an NPU's SDPA from its own fused kernel.
    """
    count(why)

    # mask and heads, as the kernels behind SDPA take them
    if causal and mask is not None:  # SDPA takes one or the other
        mask, causal = _without_future(mask, q, k), False
    grouped = k.shape[1] != q.shape[1]
    if grouped and mask is not None and q.device.type == "cuda":  # no CUDA kernel but the slow one takes both
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False

    # torch picks the kernel
    if not formula:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)

    # the formula adds the mask to the scores: what is dropped is -inf
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask.logical_not(), -math.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(
        q, k, v, mask, dropout, causal, None, scale=scale, enable_gqa=grouped
    )[0]


def why_not_fused(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why npu_fusion_attention cannot take these tensors, or None where it can.

    The only place that decides: every call within the documented limits is fused, short ones included, since torch's
    own SDPA on an NPU takes the same kernel with more to prepare. Source: torch_npu 2.13's documents of the operator,
    and those of CANN 7.0 for fp32.
    """
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}"
    if q.dtype not in _HALF and not (q.dtype == torch.float32 and takes_fp32()):
        return f"{str(q.dtype).removeprefix('torch.')} is not supported by the fused operator of CANN {host.cann_version()}"
    if q.shape[-1] != k.shape[-1] or v.shape[-1] > q.shape[-1]:
        return f"head sizes {q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]}: q and k must be equal, v no larger"
    if not 1 <= q.shape[-1] <= _MAX_HEAD_DIM:
        return f"head size {q.shape[-1]} is above {_MAX_HEAD_DIM}"
    if not 1 <= q.shape[1] <= _MAX_HEADS or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads over {k.shape[1]}: at most {_MAX_HEADS}, and a multiple"
    if max(q.shape[-2], k.shape[-2]) > _MAX_LENGTH:
        return f"{max(q.shape[-2], k.shape[-2])} positions are more than {_MAX_LENGTH}"
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
    sparse_mode, out_mask, inner_precise = _MASK, None, 0
    if mask is not None:
        keep = _without_future(mask, q, k) if causal else mask
        out_mask, inner_precise = expand_mask(keep, q, k).logical_not(), _ZERO_EMPTY_ROWS
    elif causal:  # without a mask the operator ignores sparse_mode and attends to everything
        sparse_mode, out_mask = _LEFT_UP_CAUSAL, _compressed_triangle(q.device)
    # Heads that were split from a projection lie in memory as (B, S, N, D): so they need no copy.
    as_projected = all(x.transpose(1, 2).is_contiguous() for x in (q, k, v))
    tensors = [x.transpose(1, 2) for x in (q, k, v)] if as_projected else [q, k, v]
    out = operator(
        *tensors,
        q.shape[1],
        "BSND" if as_projected else "BNSD",
        atten_mask=out_mask,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        keep_prob=1.0,
        inner_precise=inner_precise,
        sparse_mode=sparse_mode,
    )[0]
    return out.transpose(1, 2) if as_projected else out


def expand_mask(keep: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Expand a broadcastable mask to one of the operator's shapes: (S, L), (1, 1, S, L), (B, 1, S, L), (B, N, S, L)."""
    size = (q.shape[-2], k.shape[-2])
    if keep.ndim <= 2:
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


def _without_future(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Let a mask keep only what a causal query may see; a float mask drops by -inf."""
    keep = causal_keep(q.shape[-2], k.shape[-2], q.device)
    return mask & keep if mask.dtype == torch.bool else mask.masked_fill(keep.logical_not(), -math.inf)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does before SDPA: a norm of q and k in fp32 would part them from v."""
    if not torch.is_autocast_enabled("npu"):
        return tensors
    dtype = torch.get_autocast_dtype("npu")
    return tuple(x.to(dtype) if x.dtype in (*_HALF, torch.float32) else x for x in tensors)


@functools.cache
def _compressed_triangle(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for ever, and training may be the second to ask
        return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)


@functools.cache
def _npu_operator() -> Callable[..., Any]:
    import torch_npu

    return torch_npu.npu_fusion_attention


# --- Counts of attention calls: by the way each took, and why it was not fused


_FUSED = "fused"
_KIND = re.compile(r"(recomputed )?(?:fused|sdpa \((.*)\))")


def count(why: str | None) -> None:
    """Count a call: fused where nothing is said against it, else by torch's SDPA.

    Apart where a backward pass computes it again, as gradient checkpointing does.
    """
    if not torch.compiler.is_compiling():  # in a graph nothing is counted, and what is asked below would break it
        again = torch._C._current_graph_task_id() != -1  # as torch's own checkpointing asks
        counters.count(("recomputed " if again else "") + (_FUSED if why is None else f"sdpa ({why})"))


@dataclass
class AttentionCalls:
    """Sum up what was counted. why: of those by SDPA, how many for each reason; recomputed: in backward passes."""

    fused: int = 0
    sdpa: int = 0
    recomputed: int = 0
    why: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> AttentionCalls:
        """Read a counter of `counting()`; what else it counts is left aside."""
        sums = cls()
        for kind, number in counts.items():
            match = _KIND.fullmatch(kind)
            if match is None:
                continue
            if match[1]:
                sums.recomputed += number
            elif match[2] is None:
                sums.fused += number
            else:
                sums.sdpa += number
                sums.why[match[2]] += number
        return sums

    @staticmethod
    def counts(kind: str) -> bool:
        """Tell whether a key of `counting()` is about attention."""
        return _KIND.fullmatch(kind) is not None

    def record(self) -> dict[str, Any]:
        """Return it for report.json."""
        return {"fused": self.fused, "sdpa": self.sdpa, "recomputed": self.recomputed, "why": dict(self.why)}

    def sentence(self) -> str:
        """Say it in one line."""
        number = self.fused + self.sdpa
        text = f"{number} calls, {self._share()} fused"
        if self.why:
            text += f" ({', '.join(f'{count} not: {why}' for why, count in self.why.most_common())})"
        return f"{text}; {self.recomputed} more in the backward pass, recomputed" if self.recomputed else text

    def _share(self) -> str:
        if not self.fused:
            return "none"
        return str(self.fused) if self.sdpa else "all"
