"""The reference of npu_fusion_attention against torch in fp64: layouts, masks, sparse modes, dropout, limits."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from simulator.errors import Refused
from simulator.fused import attention_ops as ops
from simulator.fused import masks

BATCH, HEADS, KV_HEADS, ROWS, COLUMNS, DIM, VALUE_DIM = 2, 4, 2, 13, 21, 24, 16
SCALE = 0.3
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAYOUTS = ("BNSD", "BSND", "BSH", "SBH")


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def inputs(dtype=torch.float32, rows=ROWS, columns=COLUMNS, batch=BATCH, value_dim=VALUE_DIM):
    """Return q, k, v as (B, N, S, D)."""
    return (
        made(batch, HEADS, rows, DIM, dtype=dtype),
        made(batch, KV_HEADS, columns, DIM, dtype=dtype, seed=1),
        made(batch, KV_HEADS, columns, value_dim, dtype=dtype, seed=2),
    )


def laid_out(x, layout):
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    flat = x.transpose(1, 2).flatten(2)
    return flat.contiguous() if layout == "BSH" else flat.transpose(0, 1).contiguous()


def exact(q, k, v, keep=None, scale=SCALE):
    """Return torch's own attention in fp64, and what a gradient of dy makes of it. keep: bool, True = keep."""
    q, k, v = (each.detach().double().requires_grad_() for each in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=scale, enable_gqa=True)
    return out, (q, k, v)


def close(found, expected, dtype=torch.float32, what=""):
    assert found.dtype == dtype, what
    limit = TOLERANCE[dtype] * max(1.0, float(expected.detach().abs().max()))
    worst = float((found.double() - expected.detach().double()).abs().max())
    assert worst <= limit, f"{what}: {worst} apart, {limit} allowed"


def check_against(keep, q, k, v, layout="BNSD", **options):
    """Compare forward and backward with fp64, given which scores are kept."""
    dtype = q.dtype
    given = [laid_out(each, layout) for each in (q, k, v)]
    options = {"scale": SCALE, **options}
    out, largest, total, reserved, seed, offset, numels = ops.npu_fusion_attention(*given, HEADS, layout, **options)
    expected, leaves = exact(q, k, v, keep, options["scale"])
    close(out, laid_out(expected, layout), dtype, "attention")
    batch, _, rows, columns = *q.shape[:3], k.shape[2]
    for each in (largest, total):
        assert (
            each.shape == (batch, HEADS, rows, 8)
            and each.dtype == torch.float32
            and bool((each[..., :1] == each).all())
        )
    assert reserved.numel() == 0 and numels == batch * HEADS * rows * columns
    dy = made(*expected.shape, dtype=dtype, seed=9)
    grads = torch.autograd.grad(expected, leaves, dy.double())
    scale = options.pop("scale")
    back = ops.npu_fusion_attention_grad(
        *given, laid_out(dy, layout), HEADS, layout, softmax_max=largest, softmax_sum=total, attention_in=out,
        scale_value=scale, seed=seed, offset=offset, numels=numels, **options,
    )  # fmt: skip
    for name, found, wanted in zip(("dq", "dk", "dv"), back, grads):
        close(found, laid_out(wanted, layout), dtype, name)
    assert back[3] is None and back[4].numel() == 0


def random_mask(*shape):
    out = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.4
    out[..., 0] = False  # no row is wholly masked
    return out


def places(rows=ROWS, columns=COLUMNS):
    return torch.arange(rows).unsqueeze(1), torch.arange(columns)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(layout, dtype):
    check_against(None, *inputs(dtype), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [(ROWS, COLUMNS), (1, 1, ROWS, COLUMNS), (BATCH, 1, ROWS, COLUMNS), (BATCH, HEADS, ROWS, COLUMNS)],
    ids=["SS", "11SS", "B1SS", "BNSS"],
)
@pytest.mark.parametrize("mode", [0, 1])
def test_every_form_of_mask(shape, layout, mode):
    out = random_mask(*shape)
    as_given = out if mode else out.to(torch.uint8)
    check_against(~out, *inputs(), layout, atten_mask=as_given, sparse_mode=mode)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 77), (77, 1), (64, 77), (129, 5)])
def test_lengths_that_are_multiples_of_nothing(rows, columns):
    check_against(None, *inputs(rows=rows, columns=columns))


def test_without_a_mask_the_sparse_mode_is_ignored():
    check_against(None, *inputs(), sparse_mode=2, pre_tockens=1, next_tockens=0)


@pytest.mark.parametrize(
    ("mode", "keep", "options"),
    [
        (2, lambda i, j: j <= i, {}),
        (3, lambda i, j: j <= i + COLUMNS - ROWS, {}),
        (4, lambda i, j: (j - i - COLUMNS + ROWS <= 2) & (j - i - COLUMNS + ROWS >= -3), {"pre_tockens": 3, "next_tockens": 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [lambda m: m, lambda m: m[None, None], lambda m: m.to(torch.uint8)])
def test_sparse_modes_of_the_compressed_mask(mode, keep, options, form):
    check_against(keep(*places()), *inputs(), atten_mask=form(masks.triangle()), sparse_mode=mode, **options)


@pytest.mark.parametrize(("pre", "following"), [(ROWS, 0), (3, 4), (9, -3), (-3, 7), (65536, 65536)])
def test_a_band_of_the_default_mode(pre, following):
    i, j = places()
    keep = (j - i <= following) & (j - i >= -pre)
    full = ~keep
    if not bool(keep.any(-1).all()):  # rows outside of the band have nothing left: keep them out of the comparison
        rows = keep.any(-1)
        q, k, v = inputs()
        out = ops.npu_fusion_attention(
            q, k, v, HEADS, "BNSD", atten_mask=full, scale=SCALE, pre_tockens=pre, next_tockens=following
        )[0]
        close(out[:, :, rows], exact(q, k, v, keep)[0][:, :, rows])
        return
    check_against(keep, *inputs(), atten_mask=full, pre_tockens=pre, next_tockens=following)


def test_prefix_full_and_compressed():
    i, j = places()
    prefix = [15, 9]
    keep = torch.stack([(j <= i + COLUMNS - ROWS) | (j < n) for n in prefix]).unsqueeze(1)
    check_against(keep, *inputs(), atten_mask=~keep, sparse_mode=5, prefix=prefix)
    check_against(keep, *inputs(), atten_mask=masks.prefix_rectangle(), sparse_mode=6, prefix=prefix)


@pytest.mark.parametrize(("inner_precise", "expected"), [(0, "mean"), (1, "mean"), (2, "zero")])
def test_a_row_with_no_score_left(inner_precise, expected):
    q, k, v = inputs()
    out_mask = random_mask(ROWS, COLUMNS)
    out_mask[4] = True
    out = ops.npu_fusion_attention(q, k, v, HEADS, "BNSD", atten_mask=out_mask, inner_precise=inner_precise)[0]
    wanted = torch.zeros(VALUE_DIM) if expected == "zero" else v[0, 0].mean(0)
    torch.testing.assert_close(out[0, 0, 4], wanted)


def test_more_queries_than_keys_right_down_give_zeros():
    q, k, v = inputs(rows=COLUMNS, columns=ROWS)
    out = ops.npu_fusion_attention(q, k, v, HEADS, "BNSD", atten_mask=masks.triangle(), sparse_mode=3)[0]
    empty = COLUMNS - ROWS
    assert not out[:, :, :empty].any() and out[:, :, empty:].any()


# ------------------------------------------------------------------ sequences of different lengths


LENGTHS = [(5, 9), (3, 3), (6, 11)]


def packed(lengths=LENGTHS, dtype=torch.float32):
    rows, columns = (sum(each) for each in zip(*lengths))
    q = made(rows, HEADS, DIM, dtype=dtype)
    k, v = (made(columns, KV_HEADS, size, dtype=dtype, seed=size) for size in (DIM, VALUE_DIM))
    ends = [list(itertools.accumulate(each)) for each in zip(*lengths)]
    return q, k, v, {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}


def one_by_one(q, k, v, keeps, lengths=LENGTHS):
    """Return fp64 attention of each sequence for itself, and the leaves."""
    leaves = [each.double().requires_grad_() for each in (q, k, v)]
    parts = (each.split(size) for each, size in zip(leaves, ([r for r, _ in lengths], *[[c for _, c in lengths]] * 2)))
    outs = []
    for keep, a, b, c in zip(keeps, *parts):
        a, b, c = (each.transpose(0, 1).unsqueeze(0) for each in (a, b, c))
        outs.append(
            F.scaled_dot_product_attention(a, b, c, attn_mask=keep, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(outs), leaves


def right_down(rows, columns):
    i, j = places(rows, columns)
    return j <= i + columns - rows


def banded(rows, columns, pre, following):
    i, j = places(rows, columns)
    return (j - i - columns + rows <= following) & (j - i - columns + rows >= -pre)


@pytest.mark.parametrize(
    ("mode", "keep", "options"),
    [
        (0, lambda n, r, c: None, {}),
        (2, lambda n, r, c: places(r, c)[1] <= places(r, c)[0], {}),
        (3, lambda n, r, c: right_down(r, c), {}),
        (4, lambda n, r, c: banded(r, c, 4, 1), {"pre_tockens": 4, "next_tockens": 1}),
        (7, lambda n, r, c: banded(r, c, 11, -1) if n == 2 else right_down(r, c), {"pre_tockens": 11, "next_tockens": -1}),
        (
            8,
            lambda n, r, c: banded(r, c, 9, 1) if n == 0 else places(r, c)[1] <= places(r, c)[0],
            {"pre_tockens": 9, "next_tockens": 1},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("softmax_layout", ["", "TND"])
def test_packed_sequences(mode, keep, options, softmax_layout):
    q, k, v, ends = packed()
    keeps = [keep(n, *pair) for n, pair in enumerate(LENGTHS)]
    given = {**options, **ends, "softmax_layout": softmax_layout, "sparse_mode": mode}
    if mode:
        given["atten_mask"] = masks.triangle()
    out, largest, total, _, _, _, numels = ops.npu_fusion_attention(q, k, v, HEADS, "TND", scale=SCALE, **given)
    assert largest.shape == total.shape == (q.shape[0], HEADS, 8)
    assert numels == HEADS * sum(r * c for r, c in LENGTHS)
    expected, leaves = one_by_one(q, k, v, keeps)
    close(out, expected, what="attention")
    dy = made(*expected.shape, seed=9)
    back = ops.npu_fusion_attention_grad(
        q, k, v, dy, HEADS, "TND", softmax_max=largest, softmax_sum=total, attention_in=out, scale_value=SCALE, **given
    )
    for found, wanted in zip(back, torch.autograd.grad(expected, leaves, dy.double())):
        close(found, wanted)


def test_packed_sequences_with_a_full_mask_and_sequences_left_out():
    q, k, v, ends = packed()
    longest = (max(r for r, _ in LENGTHS), max(c for _, c in LENGTHS))
    out_mask = random_mask(*longest)
    ends = {name: [*each, 0, 0] for name, each in ends.items()}
    out = ops.npu_fusion_attention(q, k, v, HEADS, "TND", atten_mask=out_mask, scale=SCALE, **ends)[0]
    close(out, one_by_one(q, k, v, [~out_mask[:r, :c] for r, c in LENGTHS])[0])


def test_a_packed_sequence_of_length_zero():
    lengths = [(2, 2), (0, 0), (3, 4)]
    q, k, v, ends = packed(lengths)
    out = ops.npu_fusion_attention(q, k, v, HEADS, "TND", scale=SCALE, **ends)[0]
    close(out, one_by_one(q, k, v, [None] * 2, [lengths[0], lengths[2]])[0])


# ------------------------------------------------------------------ position term, sink, dropout


@pytest.mark.parametrize(
    "shape", [(BATCH, HEADS, ROWS, COLUMNS), (BATCH, HEADS, 1, COLUMNS), (1, HEADS, ROWS, COLUMNS)]
)
@pytest.mark.parametrize("pse_type", [0, 1])
def test_position_term(shape, pse_type):
    q, k, v = inputs()
    pse = made(*shape, seed=4)
    out, high, total, *_ = ops.npu_fusion_attention_v2(q, k, v, HEADS, "BNSD", pse=pse, scale=SCALE, pse_type=pse_type)
    leaves = [each.double().requires_grad_() for each in (q, k, v, pse)]
    expected = F.scaled_dot_product_attention(
        *leaves[:3], attn_mask=leaves[3] * (SCALE if pse_type else 1), scale=SCALE, enable_gqa=True
    )
    close(out, expected)
    if pse_type:
        close(ops.npu_fusion_attention(q, k, v, HEADS, "BNSD", pse=pse, scale=SCALE)[0], expected)
    dy = made(*out.shape, seed=9)
    back = ops.npu_fusion_attention_grad_v2(
        q, k, v, dy, HEADS, "BNSD", pse=pse, softmax_max=high, softmax_sum=total, attention_in=out, scale_value=SCALE,
        pse_type=pse_type,
    )  # fmt: skip
    for found, wanted in zip(back[:4], torch.autograd.grad(expected, leaves, dy.double())):
        close(found, wanted)


def test_sink():
    q, k, v = inputs()
    sink = torch.linspace(-1, 2, HEADS)
    out, high, total, *_ = ops.npu_fusion_attention(q, k, v, HEADS, "BNSD", scale=SCALE, sink=sink)
    leaves = [each.double().requires_grad_() for each in (q, k, v, sink)]
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * SCALE
    column = leaves[3].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    expected = torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ leaves[2].repeat_interleave(2, 1)
    close(out, expected)
    dy = made(*out.shape, seed=9)
    back = ops.npu_fusion_attention_grad(
        q, k, v, dy, HEADS, "BNSD", softmax_max=high, softmax_sum=total, attention_in=out, scale_value=SCALE, sink=sink
    )
    for found, wanted in zip((*back[:3], back[4]), torch.autograd.grad(expected, leaves, dy.double())):
        close(found, wanted)


def test_dropout_follows_seed_and_offset():
    """Values that are the identity show the probabilities after dropout, and so which were dropped."""
    q, k = made(2, 3, 40, 64), made(2, 3, 48, 64, seed=1)
    v = torch.eye(48).expand(2, 3, 48, 48).contiguous()
    keep_prob = 0.7
    out, high, total, _, seed, offset, numels = ops.npu_fusion_attention(
        q, k, v, 3, "BNSD", scale=0.1, keep_prob=keep_prob
    )
    p = (q.double() @ k.double().mT * 0.1).softmax(-1)
    factors = out.double() / p
    kept = factors != 0
    assert abs(float(kept.double().mean()) - keep_prob) < 0.02
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 1 / keep_prob), rtol=1e-4, atol=0)
    leaves = [each.double().requires_grad_() for each in (q, k, v)]
    expected = ((leaves[0] @ leaves[1].mT * 0.1).softmax(-1) * kept / keep_prob) @ leaves[2]
    dy = made(*out.shape, seed=9)
    statistics = {"softmax_max": high, "softmax_sum": total, "attention_in": out, "scale_value": 0.1}
    drawn = {"keep_prob": keep_prob, "seed": seed, "offset": offset, "numels": numels}
    back = ops.npu_fusion_attention_grad(q, k, v, dy, 3, "BNSD", **statistics, **drawn)
    for found, wanted in zip(back, torch.autograd.grad(expected, leaves, dy.double())):
        close(found, wanted)
    other = ops.npu_fusion_attention_grad(q, k, v, dy, 3, "BNSD", **statistics, **{**drawn, "offset": offset + 12})
    assert not torch.allclose(other[0], back[0])


def test_version_three_has_tensors_where_the_first_has_numbers():
    q, k, v, ends = packed()
    first = ops.npu_fusion_attention(q, k, v, HEADS, "TND", scale=SCALE, **ends)
    tensors = {name: torch.tensor(each) for name, each in ends.items()}
    third = ops.npu_fusion_attention_v3(q, k, v, HEADS, "TND", scale=SCALE, **tensors)
    assert len(third) == 6 and all(torch.equal(a, b) for a, b in zip(first[:4], third))
    dy = made(*first[0].shape, seed=9)
    statistics = {"softmax_max": first[1], "softmax_sum": first[2], "attention_in": first[0], "scale_value": SCALE}
    back = ops.npu_fusion_attention_grad(q, k, v, dy, HEADS, "TND", **statistics, **ends)
    again = ops.npu_fusion_attention_grad_v3(
        q, k, v, dy, HEADS, "TND", **statistics, **tensors, seed=third[4], offset=third[5]
    )
    assert all(torch.equal(a, b) for a, b in zip(back[:3], again))


# ------------------------------------------------------------------ limits


def full(*shape):
    return torch.zeros(*shape, dtype=torch.bool)


HALF = {"dtype": torch.float16}
REFUSED = {
    "fp64": ({"dtype": torch.float64}, "query is torch.float64"),
    "integers": ({"dtype": torch.int32}, "query is torch.int32"),
    "mixed dtypes": ({"key": made(2, 4, 21, 24, **HALF)}, "must have one dtype"),
    "layout": ({"layout": "NBSD"}, "input_layout 'NBSD'"),
    "dimensions": ({"layout": "BSH"}, "BSH has 3"),
    "head_num": ({"head_num": 3}, "head_num is the query's N"),
    "too many heads": (
        {"query": made(1, 257, 2, 4), "key": made(1, 257, 2, 4), "value": made(1, 257, 2, 4), "head_num": 257},
        "N is 1 to 256",
    ),
    "heads no multiple": ({"key": made(2, 3, 21, 24), "value": made(2, 3, 21, 24)}, "Nq is a multiple of Nkv"),
    "large head": (
        {"query": made(1, 4, 2, 769), "key": made(1, 4, 2, 769), "value": made(1, 4, 2, 8)},
        "D is 1 to 768",
    ),
    "value head larger": ({"value": made(2, 4, 21, 25)}, "Dq == Dk >= Dv"),
    "other value length": ({"value": made(2, 4, 20, 24)}, "one shape but for Dv"),
    "other batch": ({"key": made(3, 4, 21, 24), "value": made(3, 4, 21, 24)}, "one batch size"),
    "empty": ({"query": made(2, 4, 0, 24)}, "S is 1 to"),
    "float mask": ({"atten_mask": torch.zeros(13, 21)}, "atten_mask has to be one of bool, uint8"),
    "mask of keys": ({"atten_mask": full(2, 1, 1, 21)}, "no broadcasting"),
    "mask of one batch": ({"atten_mask": full(1, 4, 13, 21)}, "BNSS, B1SS, 11SS or SS"),
    "mask of three dimensions": ({"atten_mask": full(2, 13, 21)}, "BNSS, B1SS, 11SS or SS"),
    "mode 9": ({"sparse_mode": 9}, "sparse_mode is one of"),
    "mode 7 without TND": ({"sparse_mode": 7}, "sparse_mode is one of"),
    "causal with a full mask": ({"sparse_mode": 2, "atten_mask": full(13, 21)}, "compressed 2048 x 2048"),
    "causal upside down": ({"sparse_mode": 3, "atten_mask": ~masks.triangle()}, "compressed 2048 x 2048"),
    "band and mask disagree": ({"atten_mask": full(13, 21), "next_tockens": 0}, "must agree with pre_tockens"),
    "no band": ({"atten_mask": full(13, 21), "pre_tockens": -5, "next_tockens": 2}, "must cross the scores"),
    "prefix as SS": ({"sparse_mode": 5, "atten_mask": full(13, 21), "prefix": [9, 9]}, "BNSS or B1SS"),
    "no prefix": ({"sparse_mode": 5, "atten_mask": full(2, 1, 13, 21)}, "prefix has one number"),
    "prefix too short": ({"sparse_mode": 5, "atten_mask": full(2, 1, 13, 21), "prefix": [7, 9]}, "from 8 to 21"),
    "compressed prefix": ({"sparse_mode": 6, "atten_mask": masks.triangle(), "prefix": [9, 9]}, "3072 x 2048"),
    "padding_mask": ({"padding_mask": full(13, 21)}, "padding_mask is not supported"),
    "keep_prob 0": ({"keep_prob": 0.0}, "keep_prob is in (0, 1]"),
    "keep_prob above 1": ({"keep_prob": 1.5}, "keep_prob is in (0, 1]"),
    "inner_precise": ({"inner_precise": 3}, "0, 1 or 2"),
    "pse of another dtype": ({"pse": made(2, 4, 13, 21, **HALF)}, "must have one dtype"),
    "pse of one head": ({"pse": made(2, 1, 13, 21)}, "BNSS, BN1Skv or 1NSS"),
    "softmax_layout": ({"softmax_layout": "TND"}, "only with input_layout TND"),
    "sink of another dtype": ({"sink": torch.zeros(4, dtype=torch.float16)}, "float32 of shape [head_num]"),
    "TND without lengths": (
        {"layout": "TND", "query": made(13, 4, 24), "key": made(21, 4, 24), "value": made(21, 4, 24)},
        "TND wants cumulated lengths",
    ),
}


def called(layout="BNSD", dtype=torch.float32, query=None, key=None, value=None, head_num=4, **options):
    sizes = ((2, 4, 13, 24), (2, 4, 21, 24), (2, 4, 21, 24))
    given = [made(*size).to(dtype) if x is None else x for x, size in zip((query, key, value), sizes)]
    return ops.npu_fusion_attention(*given, head_num, layout, **options)


@pytest.mark.parametrize("case", REFUSED)
def test_each_limit_is_refused_with_its_source(case):
    called()  # the unchanged call is taken
    options, words = REFUSED[case]
    with pytest.raises(Refused) as caught:
        called(**options)
    text = str(caught.value)
    assert words in text and "Rule: " in text and "Source: npu_fusion_attention in torch_npu 2.13.0" in text


PACKED_REFUSED = {
    "prefix mode": ({"sparse_mode": 5}, "sparse_mode is one of"),
    "lengths that decrease": ({"actual_seq_qlen": [8, 5, 14]}, "never decrease"),
    "lengths beyond T": ({"actual_seq_qlen": [5, 8, 99]}, "end within T"),
    "unequal numbers": ({"actual_seq_qlen": [5, 14]}, "equally many"),
    "a mask that is not SS": ({"atten_mask": full(1, 1, 6, 11)}, "of the longest Sq and Skv"),
    "a row wholly masked": ({"atten_mask": ~full(6, 11)}, "all ones"),
    "pse": ({"pse": made(2, 4, 6, 11)}, "compressed alibi"),
    "mode 7 with a narrow band": (
        {"sparse_mode": 7, "atten_mask": masks.triangle(), "pre_tockens": 3, "next_tockens": 0},
        "pre_tockens must be at least 11 and next_tockens at most 0",
    ),
    "mode 8 with a narrow band": (
        {"sparse_mode": 8, "atten_mask": masks.triangle(), "pre_tockens": 3},
        "pre_tockens must be at least 9",
    ),
    "pse with mode 7": ({"sparse_mode": 7, "pse": made(2, 4, 6, 11)}, "take no pse"),
}


@pytest.mark.parametrize("case", PACKED_REFUSED)
def test_each_limit_of_packed_sequences(case):
    q, k, v, ends = packed()
    options, words = PACKED_REFUSED[case]
    with pytest.raises(Refused, match="Source: npu_fusion_attention") as caught:
        ops.npu_fusion_attention(q, k, v, HEADS, "TND", **{**ends, **options})
    assert words in str(caught.value)


def test_the_backward_wants_what_the_forward_gave():
    q, k, v = inputs()
    out, high, total, *_ = ops.npu_fusion_attention(q, k, v, HEADS, "BNSD")
    good = {"softmax_max": high, "softmax_sum": total, "attention_in": out}
    ops.npu_fusion_attention_grad(q, k, v, out, HEADS, "BNSD", **good)
    bad = (
        {"softmax_max": None},
        {"softmax_sum": total[..., 0]},
        {"softmax_max": high.half()},
        {"attention_in": out[:1]},
        {"keep_prob": 0.5},
    )
    for each in bad:
        with pytest.raises(Refused):
            ops.npu_fusion_attention_grad(q, k, v, out, HEADS, "BNSD", **{**good, **each})
    with pytest.raises(Refused):
        ops.npu_fusion_attention_grad(q, k, v, out.half(), HEADS, "BNSD", **good)


def test_an_older_cann_takes_halves_only(monkeypatch):
    monkeypatch.setenv("SIMULATED_NPU_CANN", "7.0.0")
    called(dtype=torch.float16)
    called(dtype=torch.bfloat16)
    with pytest.raises(Refused, match="CANN 7"):
        called(dtype=torch.float32)
