"""npu_fusion_attention, forward and backward, as the wheel documents it.

Scores, softmax and sums are in fp32 and each result is rounded once. softmax_max and softmax_sum are fp32, [B, N, Sq, 8]
(TND: [T, N, 8]); the backward recomputes the probabilities from them, as the kernel does, and takes dropout from the seed
and offset that the forward returned. A row with no score left gives zeros where the kernel knows of such rows
(masks.zeroes_empty_rows), else the mean of all values: there the kernel's finite "minus infinity" cancels out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from simulator.fused import attention_limits as limits
from simulator.fused import masks, randomness
from simulator.fused.limits import docs, require

LOWEST = torch.finfo(torch.float32).min
Lengths = Sequence[int] | None


@dataclass(frozen=True)
class Call:
    """A checked call: sizes, which scores count, how they are made."""

    op: str
    shape: limits.Shape
    sparsity: masks.Sparsity
    scale: float
    keep_prob: float
    pse_type: int = 1
    lengths: list[tuple[int, int]] = field(default_factory=list)

    @property
    def varlen(self) -> bool:
        return self.shape.layout == "TND"


def prepare(
    op: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None, padding_mask: Tensor | None, scale: float, keep_prob: float, pre: int, following: int,
    inner_precise: int, prefix: Lengths, actual_seq_qlen: Lengths, actual_seq_kvlen: Lengths, sparse_mode: int,
    softmax_layout: str, sink: Tensor | None, pse_type: int = 1,
) -> Call:  # fmt: skip
    """Check every documented limit that does not depend on the mask.

    Raises: Refused.
    """
    limits.check_scalars(op, keep_prob, padding_mask, inner_precise)
    shape = limits.shape_of(op, query, key, value, head_num, input_layout)
    limits.check_batches(op, query, key, shape)
    limits.check_softmax_layout(op, softmax_layout, shape.layout)
    limits.check_sink(op, sink, shape.heads)
    require(pse_type in (0, 1), op, f"pse_type {pse_type}", "these references play pse_type 0 and 1", docs(op))
    sparsity = masks.Sparsity(op, sparse_mode, pre, following, tuple(prefix or ()), inner_precise)
    lengths: list[tuple[int, int]] = []
    if shape.layout == "TND":
        masks.check_varlen_mode(sparsity)
        lengths = limits.sequences(op, shape, actual_seq_qlen, actual_seq_kvlen)
    empty = any(0 in pair for pair in lengths)
    limits.check_pse(op, pse, query, shape, sparse_mode, empty)
    return Call(op, shape, sparsity, scale, keep_prob, pse_type, lengths)


def forward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, mask: Tensor | None,
    sink: Tensor | None, softmax_layout: str, seed: int, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (attention in the input's layout and dtype, softmax_max, softmax_sum)."""
    pieces = [
        _forward_piece(call, *parts, seed=seed, offset=offset)
        for parts in _pieces(call, query, key, value, pse, mask, sink)
    ]
    shape = call.shape
    if not call.varlen:
        out, largest, total = pieces[0]
        return _from_bnsd(out, shape.layout).to(query.dtype), _eight(largest), _eight(total)
    attention = torch.zeros(shape.rows, shape.heads, shape.value_dim)
    largest = torch.zeros(shape.heads, shape.rows)
    total = torch.zeros(shape.heads, shape.rows)
    start = 0
    for (rows, _), (out, high, sums) in zip(call.lengths, pieces):
        attention[start : start + rows] = out[0].transpose(0, 1)
        largest[:, start : start + rows], total[:, start : start + rows] = high[0], sums[0]
        start += rows
    flat = [_varlen_statistics(each, softmax_layout) for each in (largest, total)]
    return attention.to(query.dtype), flat[0], flat[1]


def backward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, dy: Tensor, pse: Tensor | None, mask: Tensor | None,
    sink: Tensor | None, softmax_max: Tensor | None, softmax_sum: Tensor | None, attention_in: Tensor | None,
    softmax_layout: str, seed: int, offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return (dq, dk, dv, dpse or None, dsink): probabilities recomputed from the forward's maxima and sums."""
    shape = call.shape
    source = docs(call.op)
    require(
        softmax_max is not None and softmax_sum is not None and attention_in is not None,
        call.op, "softmax_max, softmax_sum or attention_in is missing", "the backward wants all three", source,
    )  # fmt: skip
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    require(
        dy.shape == attention_in.shape and dy.dtype == query.dtype,
        call.op, f"dy {list(dy.shape)} {dy.dtype}", "dy has the attention's shape and the query's dtype", source,
    )  # fmt: skip
    largest = _statistics(call, softmax_max, "softmax_max", softmax_layout)
    total = _statistics(call, softmax_sum, "softmax_sum", softmax_layout)
    dq, dk, dv = (torch.zeros(each.shape) for each in (query, key, value))
    dpse = None
    dsink = torch.zeros(shape.heads) if sink is not None else torch.zeros(0)
    rows_done = columns_done = 0
    for parts in _pieces(call, query, key, value, pse, mask, sink):
        rows, columns = parts[1].shape[2], parts[2].shape[2]
        out = _slice(call, attention_in, rows_done, rows)
        gradient = _slice(call, dy, rows_done, rows)
        high, sums = (each[..., rows_done : rows_done + rows] for each in (largest, total))
        grads = _backward_piece(call, *parts, gradient, out, high, sums, seed=seed, offset=offset)
        if not call.varlen:
            dq, dk, dv = (_from_bnsd(each, shape.layout) for each in grads[:3])
            dpse = None if pse is None else grads[3].sum_to_size(pse.shape).to(pse.dtype)
        else:
            dq[rows_done : rows_done + rows] = grads[0][0].transpose(0, 1)
            dk[columns_done : columns_done + columns] = grads[1][0].transpose(0, 1)
            dv[columns_done : columns_done + columns] = grads[2][0].transpose(0, 1)
        if sink is not None:
            dsink += grads[4]
        rows_done, columns_done = rows_done + rows, columns_done + columns
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dpse, dsink


def numels(call: Call) -> int:
    """Return the number of scores, which is the length of the dropout mask."""
    shape = call.shape
    if call.varlen:
        return shape.heads * sum(rows * columns for rows, columns in call.lengths)
    return shape.batch * shape.heads * shape.rows * shape.columns


def _pieces(call: Call, query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, mask: Tensor | None,
            sink: Tensor | None) -> list[tuple[int, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]]:  # fmt: skip
    """Return (first score's number, q, k, v in fp32 [B, N, S, D], pse, masked out, sink), one a sequence with TND."""
    shape = call.shape
    if not call.varlen:
        out = masks.masked_out(mask, call.sparsity, shape.batch, shape.heads, shape.rows, shape.columns)
        q = _to_bnsd(query, shape.layout, shape.heads)
        k, v = (_to_bnsd(each, shape.layout, shape.kv_heads) for each in (key, value))
        return [(0, q, k, v, pse, out, sink)]
    longest = (max(rows for rows, _ in call.lengths), max(columns for _, columns in call.lengths))
    found = []
    number = row = column = 0
    for index, (rows, columns) in enumerate(call.lengths):
        out = masks.varlen_masked_out(mask, call.sparsity, index, call.lengths, longest)
        q = query[row : row + rows].float().transpose(0, 1).unsqueeze(0)
        k, v = (each[column : column + columns].float().transpose(0, 1).unsqueeze(0) for each in (key, value))
        found.append((number, q, k, v, pse, out, sink))
        number, row, column = number + shape.heads * rows * columns, row + rows, column + columns
    return found


def _scores(call: Call, q: Tensor, k: Tensor, pse: Tensor | None, out: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT
    if pse is None:
        scores *= call.scale
    elif call.pse_type == 1:
        scores = (scores + pse.float()) * call.scale
    else:
        scores = scores * call.scale + pse.float()
    return scores if out is None else scores.masked_fill(out, LOWEST)


def _dropped(call: Call, number: int, scores: Tensor, seed: int, offset: int) -> Tensor | None:
    """Return the factors of dropout, 0 or 1 / keep_prob, of the scores from the given number on."""
    if call.keep_prob == 1:
        return None
    kept = randomness.kept(numels(call), call.keep_prob, seed, offset)
    return kept[number : number + scores.numel()].view(scores.shape) / call.keep_prob


def _probabilities(call: Call, scores: Tensor, high: Tensor, sums: Tensor) -> Tensor:
    p = torch.exp(scores - high.unsqueeze(-1)) / sums.unsqueeze(-1)
    if masks.zeroes_empty_rows(call.sparsity):
        p = p.masked_fill((high == LOWEST).unsqueeze(-1), 0.0)
    return p


def _forward_piece(call: Call, number: int, q: Tensor, k: Tensor, v: Tensor, pse: Tensor | None, out: Tensor | None,
                   sink: Tensor | None, *, seed: int, offset: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _scores(call, q, k, pse, out)
    if not scores.numel():
        empty = scores.new_zeros(scores.shape[:-1])
        return scores.new_zeros(*scores.shape[:-1], v.shape[-1]), empty, empty
    high = scores.amax(-1)
    if sink is not None:
        high = torch.maximum(high, sink.view(1, -1, 1))
    sums = torch.exp(scores - high.unsqueeze(-1)).sum(-1)
    if sink is not None:
        sums = sums + torch.exp(sink.view(1, -1, 1) - high)
    p = _probabilities(call, scores, high, sums)
    factors = _dropped(call, number, scores, seed, offset)
    p = p if factors is None else p * factors
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), high, sums


def _backward_piece(
    call: Call, number: int, q: Tensor, k: Tensor, v: Tensor, pse: Tensor | None, out: Tensor | None,
    sink: Tensor | None, dy: Tensor, attention: Tensor, high: Tensor, sums: Tensor, *, seed: int, offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _scores(call, q, k, pse, out)
    p = _probabilities(call, scores, high, sums)
    factors = _dropped(call, number, scores, seed, offset)
    groups = q.shape[1] // k.shape[1]
    dp = dy @ v.repeat_interleave(groups, 1).mT
    seen = p
    if factors is not None:
        dp, seen = dp * factors, p * factors
    delta = (dy * attention).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    if out is not None:
        ds = ds.masked_fill(out, 0.0)
    dv = _sum_groups(seen.mT @ dy, groups)
    dpse = ds if call.pse_type == 0 else ds * call.scale
    ds = ds * call.scale
    dq = ds @ k.repeat_interleave(groups, 1)
    dk = _sum_groups(ds.mT @ q, groups)
    dsink = torch.zeros(0)
    if sink is not None:
        share = torch.exp(sink.view(1, -1, 1) - high) / sums
        dsink = -(share * delta.squeeze(-1)).sum((0, 2))
    return dq, dk, dv, dpse, dsink


def _sum_groups(gradient: Tensor, groups: int) -> Tensor:
    """Add up what the query heads of a group gave to their one key or value head."""
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)


def _to_bnsd(x: Tensor, layout: str, heads: int) -> Tensor:
    x = x.float()
    if layout in ("BSH", "SBH"):
        x = x.unflatten(-1, (heads, -1))
    return {"BNSD": x, "BSND": x.transpose(1, 2), "BSH": x.transpose(1, 2)}.get(layout, x.permute(1, 2, 0, 3))


def _from_bnsd(x: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x.contiguous()
    x = x.permute(2, 0, 1, 3) if layout == "SBH" else x.transpose(1, 2)
    return (x if layout == "BSND" else x.flatten(-2)).contiguous()


def _slice(call: Call, x: Tensor, start: int, rows: int) -> Tensor:
    """Return the rows of one sequence of an output, or all of it, as fp32 [B, N, S, D]."""
    if not call.varlen:
        return _to_bnsd(x, call.shape.layout, call.shape.heads)
    return x[start : start + rows].float().transpose(0, 1).unsqueeze(0)


def _eight(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).expand(*x.shape, limits.SOFTMAX_COPIES).contiguous()


def _varlen_statistics(x: Tensor, softmax_layout: str) -> Tensor:
    """Return [N, T] as the kernel lays it out: in memory NTD by default, under the shape [T, N, 8]."""
    heads, rows = x.shape
    eight = _eight(x.t() if softmax_layout == "TND" else x)
    return eight.reshape(rows, heads, limits.SOFTMAX_COPIES)


def _statistics(call: Call, x: Tensor, name: str, softmax_layout: str) -> Tensor:
    """Return softmax_max or softmax_sum as [B, N, Sq].

    Raises: Refused where it does not have the forward's shape and dtype.
    """
    shape = call.shape
    one = (shape.rows, shape.heads) if call.varlen else (shape.batch, shape.heads, shape.rows)
    require(
        x.dtype == torch.float32 and tuple(x.shape) == (*one, limits.SOFTMAX_COPIES),
        call.op, f"{name} is {x.dtype} {list(x.shape)}", f"{name} is float32 {[*one, 8]}", docs(call.op),
    )  # fmt: skip
    if not call.varlen:
        return x[..., 0]
    if softmax_layout == "TND":
        return x[..., 0].t().unsqueeze(0)
    return x.reshape(shape.heads, shape.rows, limits.SOFTMAX_COPIES)[..., 0].unsqueeze(0)
