"""The run-time signatures of npu_fusion_attention, its versions 2 and 3, and their backward operators.

Version 3 is what the wheel's scaled_dot_product_attention calls: seed, offset and lengths are tensors there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simulator.fused import attention, randomness
from simulator.fused.limits import docs, require

NO_BAND = 2147483647
Lengths = Sequence[int] | None
Forward = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]
Backward = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = NO_BAND, next_tockens: int = NO_BAND, inner_precise: int = 0, prefix: Lengths = None,
    actual_seq_qlen: Lengths = None, actual_seq_kvlen: Lengths = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
    dropout_mask: Tensor | None = None, seed: int = 0, offset: int = 0,
) -> Forward:  # fmt: skip
    """Return (attention, softmax_max, softmax_sum, reserved, seed, offset, numels).

    Raises: Refused where a documented limit is broken.
    """
    call = attention.prepare(
        "npu_fusion_attention", query, key, value, head_num, input_layout, pse=pse, padding_mask=padding_mask,
        scale=scale, keep_prob=keep_prob, pre=pre_tockens, following=next_tockens, inner_precise=inner_precise,
        prefix=prefix, actual_seq_qlen=actual_seq_qlen, actual_seq_kvlen=actual_seq_kvlen, sparse_mode=sparse_mode,
        softmax_layout=softmax_layout, sink=sink,
    )  # fmt: skip
    return _forward(call, query, key, value, pse, atten_mask, sink, softmax_layout, dropout_mask)


def npu_fusion_attention_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = NO_BAND,
    next_tokens: int = NO_BAND, inner_precise: int = 0, prefix: Lengths = None, actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    pse_type: int = 1, q_start_idx: Lengths = None, kv_start_idx: Lengths = None, softmax_layout: str = "",
    sink: Tensor | None = None, dropout_mask: Tensor | None = None, seed: int = 0, offset: int = 0,
) -> Forward:  # fmt: skip
    """Return what npu_fusion_attention does, with pse_type 0 the position term added after the scaling."""
    _no_rope("npu_fusion_attention_v2", query_rope, key_rope)
    call = attention.prepare(
        "npu_fusion_attention_v2", query, key, value, head_num, input_layout, pse=pse, padding_mask=padding_mask,
        scale=scale, keep_prob=keep_prob, pre=pre_tokens, following=next_tokens, inner_precise=inner_precise,
        prefix=prefix, actual_seq_qlen=actual_seq_qlen, actual_seq_kvlen=actual_seq_kvlen, sparse_mode=sparse_mode,
        softmax_layout=softmax_layout, sink=sink, pse_type=pse_type,
    )  # fmt: skip
    return _forward(call, query, key, value, pse, atten_mask, sink, softmax_layout, dropout_mask)


def npu_fusion_attention_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = NO_BAND, next_tockens: int = NO_BAND, inner_precise: int = 0, prefix: Lengths = None,
    actual_seq_qlen: Tensor | None = None, actual_seq_kvlen: Tensor | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (attention, softmax_max, softmax_sum, reserved, seed, offset), the last two as tensors."""
    call = attention.prepare(
        "npu_fusion_attention_v3", query, key, value, head_num, input_layout, pse=pse, padding_mask=padding_mask,
        scale=scale, keep_prob=keep_prob, pre=pre_tockens, following=next_tockens, inner_precise=inner_precise,
        prefix=prefix, actual_seq_qlen=_numbers(actual_seq_qlen), actual_seq_kvlen=_numbers(actual_seq_kvlen),
        sparse_mode=sparse_mode, softmax_layout=softmax_layout, sink=sink,
    )  # fmt: skip
    found = _forward(call, query, key, value, pse, atten_mask, sink, softmax_layout, None)
    return *found[:4], torch.tensor([found[4]]), torch.tensor([found[5]])


def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = NO_BAND,
    next_tockens: int = NO_BAND, inner_precise: int = 0, seed: int = 0, offset: int = 0, numels: int = 0,
    prefix: Lengths = None, actual_seq_qlen: Lengths = None, actual_seq_kvlen: Lengths = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> Backward:  # fmt: skip
    """Return (dq, dk, dv, dpse, dsink) from the maxima, sums, seed and offset that the forward gave."""
    call = attention.prepare(
        "npu_fusion_attention_grad", query, key, value, head_num, input_layout, pse=pse, padding_mask=padding_mask,
        scale=scale_value, keep_prob=keep_prob, pre=pre_tockens, following=next_tockens, inner_precise=inner_precise,
        prefix=prefix, actual_seq_qlen=actual_seq_qlen, actual_seq_kvlen=actual_seq_kvlen, sparse_mode=sparse_mode,
        softmax_layout=softmax_layout, sink=sink,
    )  # fmt: skip
    if keep_prob < 1:
        require(
            numels == attention.numels(call), call.op, f"numels {numels} for {attention.numels(call)} scores",
            "seed, offset and numels are the forward's", docs(call.op),
        )  # fmt: skip
    return attention.backward(
        call, query, key, value, dy, pse, atten_mask, sink, softmax_max, softmax_sum, attention_in, softmax_layout,
        seed, offset,
    )  # fmt: skip


def npu_fusion_attention_grad_v2(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    scale_value: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = NO_BAND, next_tokens: int = NO_BAND,
    inner_precise: int = 0, seed: int = 0, offset: int = 0, numels: int = 0, prefix: Lengths = None,
    actual_seq_qlen: Lengths = None, actual_seq_kvlen: Lengths = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = 1, q_start_idx: Lengths = None,
    kv_start_idx: Lengths = None, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv, dpse, dq_rope, dk_rope, dsink)."""
    _no_rope("npu_fusion_attention_grad_v2", query_rope, key_rope)
    call = attention.prepare(
        "npu_fusion_attention_grad_v2", query, key, value, head_num, input_layout, pse=pse, padding_mask=padding_mask,
        scale=scale_value, keep_prob=keep_prob, pre=pre_tokens, following=next_tokens, inner_precise=inner_precise,
        prefix=prefix, actual_seq_qlen=actual_seq_qlen, actual_seq_kvlen=actual_seq_kvlen, sparse_mode=sparse_mode,
        softmax_layout=softmax_layout, sink=sink, pse_type=pse_type,
    )  # fmt: skip
    dq, dk, dv, dpse, dsink = attention.backward(
        call, query, key, value, dy, pse, atten_mask, sink, softmax_max, softmax_sum, attention_in, softmax_layout,
        seed, offset,
    )  # fmt: skip
    return dq, dk, dv, dpse, query.new_zeros(0), query.new_zeros(0), dsink


def npu_fusion_attention_grad_v3(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = NO_BAND,
    next_tockens: int = NO_BAND, inner_precise: int = 0, seed: Tensor | None = None, offset: Tensor | None = None,
    prefix: Lengths = None, actual_seq_qlen: Tensor | None = None, actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "",
    sink: Tensor | None = None,
) -> Backward:  # fmt: skip
    """Return (dq, dk, dv, dpse, dsink); seed and offset are the forward's tensors."""
    call = attention.prepare(
        "npu_fusion_attention_grad_v3", query, key, value, head_num, input_layout, pse=pse, padding_mask=padding_mask,
        scale=scale_value, keep_prob=keep_prob, pre=pre_tockens, following=next_tockens, inner_precise=inner_precise,
        prefix=prefix, actual_seq_qlen=_numbers(actual_seq_qlen), actual_seq_kvlen=_numbers(actual_seq_kvlen),
        sparse_mode=sparse_mode, softmax_layout=softmax_layout, sink=sink,
    )  # fmt: skip
    if keep_prob < 1:
        require(
            seed is not None and offset is not None, call.op, "no seed or offset with keep_prob below 1",
            "seed and offset are the forward's", docs(call.op),
        )  # fmt: skip
    return attention.backward(
        call, query, key, value, dy, pse, atten_mask, sink, softmax_max, softmax_sum, attention_in, softmax_layout,
        _number(seed), _number(offset),
    )  # fmt: skip


def _forward(
    call: attention.Call, query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, mask: Tensor | None,
    sink: Tensor | None, softmax_layout: str, dropout_mask: Tensor | None,
) -> Forward:  # fmt: skip
    require(
        dropout_mask is None, call.op, "a dropout_mask of the caller's", "these references make the mask", docs(call.op)
    )
    seed, offset = randomness.draw_seed_and_offset() if call.keep_prob < 1 else (0, 0)
    found = attention.forward(call, query, key, value, pse, mask, sink, softmax_layout, seed, offset)
    return *found, query.new_zeros(0), seed, offset, attention.numels(call)


def _no_rope(op: str, query_rope: Tensor | None, key_rope: Tensor | None) -> None:
    require(
        query_rope is None and key_rope is None, op, "query_rope or key_rope", "these references play none", docs(op)
    )


def _numbers(lengths: Tensor | None) -> list[int] | None:
    return None if lengths is None else [int(each) for each in lengths]


def _number(of: Tensor | None) -> int:
    return 0 if of is None else int(of.flatten()[0])
