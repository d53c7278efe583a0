"""The documented limits of npu_fusion_attention, checked on shapes and dtypes before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simulator.fused.limits import cann_at_least, docs, refuse, require, require_dtype, require_same_dtype

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
MAX_HEAD_DIM = 768
MAX_HEADS = 256
MAX_SEQUENCE = 2**20
MAX_BATCH = 2 * 2**20
MAX_VARLEN_BATCH = 2 * 2**10
FP32_SINCE = (8, 0)
SOFTMAX_COPIES = 8  # softmax_max and softmax_sum hold each number eight times
OLD_CANN = "diffusers, attention_processor.py (the NPU branch takes fp16 and bf16 only) and CANN 7.0 release documents"


@dataclass(frozen=True)
class Shape:
    """Sizes of one call. With TND, rows and columns are of all sequences together and batch is their number."""

    layout: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    head_dim: int
    value_dim: int


def shape_of(op: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str) -> Shape:
    """Read the sizes of a call from its tensors.

    Raises: Refused where layout, dimensions, dtypes or sizes are outside of the documented limits.
    """
    source = docs(op)
    layout = input_layout.upper()
    require(layout in LAYOUTS, op, f"input_layout {input_layout!r}", f"one of {', '.join(LAYOUTS)}", source)
    dims = 4 if layout in ("BSND", "BNSD") else 3
    for name, each in (("query", query), ("key", key), ("value", value)):
        require(each.ndim == dims, op, f"{name} has {each.ndim} dimensions", f"{layout} has {dims}", source)
    _check_dtypes(op, query, key, value)
    require(head_num > 0, op, f"head_num {head_num}", f"head_num is 1 to {MAX_HEADS}", source)
    found = _sizes(op, query, key, value, head_num, layout)
    _check_sizes(op, found, key.shape[:-1] == value.shape[:-1], head_num, source)
    return found


def check_batches(op: str, query: Tensor, key: Tensor, shape: Shape) -> None:
    """Refuse a key of another batch size than the query's."""
    if shape.layout == "TND":
        return
    axis = 1 if shape.layout == "SBH" else 0
    require(
        query.shape[axis] == key.shape[axis], op, f"batch {query.shape[axis]} and {key.shape[axis]}",
        "query, key and value have one batch size", docs(op),
    )  # fmt: skip


def sequences(
    op: str, shape: Shape, actual_seq_qlen: Sequence[int] | None, actual_seq_kvlen: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Return (Sq, Skv) of each sequence of a TND call from the cumulated lengths.

    Raises: Refused where they are missing, decrease, or do not add up to T. Zeros at the end are sequences left out.
    """
    source = docs(op)
    query_ends, kv_ends = tuple(actual_seq_qlen or ()), tuple(actual_seq_kvlen or ())
    if not query_ends or len(query_ends) != len(kv_ends) or len(query_ends) > MAX_VARLEN_BATCH:
        refuse(
            op, f"actual_seq_qlen {query_ends}, actual_seq_kvlen {kv_ends}",
            f"TND wants cumulated lengths of both, equally many, 1 to {MAX_VARLEN_BATCH}", source,
        )  # fmt: skip
    while len(query_ends) > 1 and query_ends[-1] == 0 and kv_ends[-1] == 0:
        query_ends, kv_ends = query_ends[:-1], kv_ends[:-1]
    rows, columns = _differences(query_ends), _differences(kv_ends)
    require(
        min(rows) >= 0 and min(columns) >= 0 and query_ends[-1] <= shape.rows and kv_ends[-1] <= shape.columns,
        op,
        f"actual_seq_qlen {query_ends} for {shape.rows} rows, actual_seq_kvlen {kv_ends} for {shape.columns}",
        "cumulated lengths never decrease and end within T",
        source,
    )
    return list(zip(rows, columns))


def check_pse(op: str, pse: Tensor | None, query: Tensor, shape: Shape, sparse_mode: int, empty: bool) -> None:
    """Refuse a position term of another dtype or of a shape other than BNSS, BN1Skv and 1NSS, or its last 1024 rows."""
    if pse is None:
        return
    source = docs(op)
    require_same_dtype(op, source, query=query, pse=pse)
    require(sparse_mode not in (7, 8), op, f"pse with sparse_mode {sparse_mode}", "modes 7 and 8 take no pse", source)
    require(not empty, op, "pse with a sequence of length 0", "a sequence of length 0 excludes pse", source)
    require(
        shape.layout != "TND", op, "pse with TND",
        "with TND only the compressed alibi form exists, which these references do not play", source,
    )  # fmt: skip
    heads, rows, columns = shape.heads, shape.rows, shape.columns
    allowed = {(shape.batch, heads, rows, columns), (shape.batch, heads, 1, columns), (1, heads, rows, columns)}
    require(
        tuple(pse.shape) in allowed, op, f"pse has shape {list(pse.shape)}",
        "pse is BNSS, BN1Skv or 1NSS", source,
    )  # fmt: skip


def check_scalars(op: str, keep_prob: float, padding_mask: Tensor | None, inner_precise: int) -> None:
    """Refuse a keep_prob outside of (0, 1] and what is reserved."""
    source = docs(op)
    require(0 < keep_prob <= 1, op, f"keep_prob {keep_prob}", "keep_prob is in (0, 1]", source)
    require(padding_mask is None, op, "a padding_mask", "padding_mask is not supported yet", source)
    require(inner_precise in (0, 1, 2), op, f"inner_precise {inner_precise}", "0, 1 or 2", source)


def check_softmax_layout(op: str, softmax_layout: str, layout: str) -> None:
    """Refuse a layout of the softmax's results other than the default and, with TND, "TND"."""
    allowed = ("", "TND") if layout == "TND" else ("",)
    require(
        softmax_layout in allowed, op, f"softmax_layout {softmax_layout!r} with {layout}",
        'softmax_layout is "TND", and only with input_layout TND', docs(op),
    )  # fmt: skip


def check_sink(op: str, sink: Tensor | None, heads: int) -> None:
    """Refuse a sink that is not one fp32 number a head."""
    if sink is not None:
        require(
            sink.dtype == torch.float32 and tuple(sink.shape) == (heads,), op, f"sink {sink.dtype} {list(sink.shape)}",
            "sink is float32 of shape [head_num]", docs(op),
        )  # fmt: skip


def _check_dtypes(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    new = cann_at_least(*FP32_SINCE)
    allowed = (torch.float16, torch.bfloat16, torch.float32) if new else (torch.float16, torch.bfloat16)
    for name, each in (("query", query), ("key", key), ("value", value)):
        require_dtype(op, name, each, allowed, docs(op) if new else OLD_CANN)
    require_same_dtype(op, docs(op), query=query, key=key, value=value)


def _sizes(op: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str) -> Shape:
    if layout == "TND":
        (rows, heads, dim), (columns, kv_heads, _) = query.shape, key.shape
        return Shape(layout, 1, heads, kv_heads, rows, columns, dim, value.shape[-1])
    if layout == "BNSD":
        batch, heads, rows, dim = query.shape
        return Shape(layout, batch, heads, key.shape[1], rows, key.shape[2], dim, value.shape[-1])
    if layout == "BSND":
        batch, rows, heads, dim = query.shape
        return Shape(layout, batch, heads, key.shape[2], rows, key.shape[1], dim, value.shape[-1])
    batch, rows = (query.shape[0], query.shape[1]) if layout == "BSH" else (query.shape[1], query.shape[0])
    columns = key.shape[1 if layout == "BSH" else 0]
    dim, rest = divmod(query.shape[2], head_num)
    kv_heads, kv_rest = divmod(key.shape[2], dim) if dim else (0, 1)
    value_dim, value_rest = divmod(value.shape[2], kv_heads) if kv_heads else (0, 1)
    require(
        not (rest or kv_rest or value_rest),
        op,
        f"H of query {query.shape[2]}, key {key.shape[2]}, value {value.shape[2]} with head_num {head_num}",
        "H is N * D for whole N and D",
        docs(op),
    )
    return Shape(layout, batch, head_num, kv_heads, rows, columns, dim, value_dim)


def _check_sizes(op: str, found: Shape, alike: bool, head_num: int, source: str) -> None:
    heads, kv_heads = found.heads, found.kv_heads
    require(heads == head_num, op, f"head_num {head_num}, query has {heads}", "head_num is the query's N", source)
    require(1 <= heads <= MAX_HEADS, op, f"{heads} heads", f"N is 1 to {MAX_HEADS}", source)
    require(
        kv_heads > 0 and heads % kv_heads == 0, op, f"Nq {heads}, Nkv {kv_heads}", "Nq is a multiple of Nkv", source
    )
    require(
        1 <= found.head_dim <= MAX_HEAD_DIM and 1 <= found.value_dim <= found.head_dim,
        op,
        f"D {found.head_dim} of query and key, {found.value_dim} of value",
        f"D is 1 to {MAX_HEAD_DIM}, and Dq == Dk >= Dv",
        source,
    )
    for name, size in (("query", found.rows), ("key", found.columns)):
        require(1 <= size <= MAX_SEQUENCE, op, f"{name} has S {size}", f"S is 1 to {MAX_SEQUENCE}", source)
    require(1 <= found.batch <= MAX_BATCH, op, f"batch {found.batch}", f"B is 1 to {MAX_BATCH}", source)
    require(
        alike or found.layout in ("BSH", "SBH"), op, "key and value differ in more than D",
        "key and value have one shape but for Dv <= Dk", source,
    )  # fmt: skip


def _differences(ends: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in zip((0, *ends), ends)]
