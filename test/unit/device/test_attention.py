"""Attention: against the textbook, against diffusers, and its NPU side against a strict model of the operator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from refusals import names

from difftrain.device import AttentionCalls, attend, attention, counting, why_not_fused


def _qkv(
    b: int = 2, n: int = 4, s: int = 5, t: int = 7, d: int = 8, kv_heads: int | None = None, projected: bool = False
) -> list[torch.Tensor]:
    """(B, N, S, D); in memory as a projection leaves them, (B, S, N, D), where `projected`."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((b, n, s, d), (b, kv_heads or n, t, d), (b, kv_heads or n, t, d))
    made = [torch.randn(*shape, generator=generator) for shape in shapes]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made] if projected else made


def _textbook(q, k, v, mask=None, causal=False, scale=None) -> torch.Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if causal:
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        scores = scores.masked_fill(columns > rows, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v  # a row without a key gives zeros


def _mask(*shape: int) -> torch.Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 0] = True  # no row without a key
    return mask


MASKS = {
    "none": None,
    "(S, L)": (5, 7),
    "(1, L)": (1, 7),
    "(N, S, L)": (4, 5, 7),
    "(B, 1, 1, L)": (2, 1, 1, 7),
    "(B, 1, S, L)": (2, 1, 5, 7),
    "(B, N, S, L)": (2, 4, 5, 7),
    "(B, N, 1, L)": (2, 4, 1, 7),
    "(1, N, S, L)": (1, 4, 5, 7),
    "(1, 1, S, L)": (1, 1, 5, 7),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_equals_the_textbook(shape: Any, causal: bool, scale: float | None) -> None:
    q, k, v = _qkv()
    mask = None if shape is None else _mask(*shape)
    torch.testing.assert_close(attention(q, k, v, mask, causal, scale), _textbook(q, k, v, mask, causal, scale))


def test_grouped_heads() -> None:
    q, k, v = _qkv(kv_heads=2)
    torch.testing.assert_close(attention(q, k, v), _textbook(q, k, v))


@pytest.mark.parametrize("way", ["sdpa", "formula", "fused"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (2, 4, 5, 7)], ids=str)
def test_a_row_that_keeps_nothing_gives_zeros_and_no_gradient(shape: Any, way: str) -> None:
    tensors = [x.requires_grad_() for x in _qkv()]
    mask = _mask(*shape)
    mask[..., 2, :] = False
    if way == "fused":
        out = attend.run_fused(strict_operator, *tensors, mask, False, None)
    else:
        out = attend.unfused(*tensors, mask, False, None, why="here", formula=way == "formula")
    torch.testing.assert_close(out, _textbook(*tensors, mask))
    assert not out[:, :, 2].any()
    gradients = torch.autograd.grad(out.square().sum(), tensors)
    assert all(each.isfinite().all() for each in gradients) and not gradients[0][:, :, 2].any()


def test_float_masks_are_added_only_where_that_is_said() -> None:
    q, k, v = _qkv()
    bias = torch.randn(2, 1, 5, 7)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    for formula in (False, True):
        with counting() as calls:
            out = attend.unfused(q, k, v, bias, False, None, why="a bias", formula=formula)
        torch.testing.assert_close(out, wanted)
        assert calls == {"sdpa (a bias)": 1}
    causal = attend.unfused(q, k, v, bias, True, None, why="a bias")
    seen = bias.masked_fill(torch.ones(5, 7).bool().triu(1), -math.inf)
    torch.testing.assert_close(causal, torch.nn.functional.scaled_dot_product_attention(q, k, v, seen))


def test_float_masks_are_refused() -> None:
    q, k, v = _qkv()
    with pytest.raises(TypeError, match="bool mask"):
        attention(q, k, v, torch.zeros(5, 7))


def strict_operator(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0,
):  # fmt: skip
    """npu_fusion_attention as its documents say: the mask drops, is never broadcast, and rules sparse_mode."""
    assert input_layout in ("BNSD", "BSND") and 0 < keep_prob <= 1
    if input_layout == "BSND":
        assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    b, n, s, d = query.shape
    t = key.shape[2]
    assert head_num == n and d == key.shape[3] >= value.shape[3]
    assert query.dtype == key.dtype == value.dtype
    keep = None
    if atten_mask is not None:
        assert atten_mask.dtype in (torch.bool, torch.uint8) and atten_mask.is_contiguous()
        if sparse_mode == 2:
            assert atten_mask.shape == (2048, 2048) and torch.equal(atten_mask, torch.ones(2048, 2048).bool().triu(1))
            keep = torch.ones(s, t).bool().tril()
        else:
            assert sparse_mode == 0
            assert tuple(atten_mask.shape) in {(s, t), (1, 1, s, t), (b, 1, s, t), (b, n, s, t)}, atten_mask.shape
            keep = ~atten_mask.bool()
    out = _textbook(query, key, value, keep, False, scale)
    if keep is not None and inner_precise != 2:  # a row that keeps nothing gives the mean of all values
        mean = value.repeat_interleave(n // value.shape[1], 1).mean(-2, keepdim=True)
        out = torch.where(keep.any(-1, keepdim=True), out, mean)
    return out.transpose(1, 2) if input_layout == "BSND" else out, None, None, None, 0, 0, 0


@pytest.mark.parametrize("projected", [False, True], ids=["BNSD", "BSND"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
def test_the_fused_call_means_the_same(shape: Any, causal: bool, projected: bool) -> None:
    tensors = [x.requires_grad_() for x in _qkv(projected=projected)]
    mask = None if shape is None else _mask(*shape)
    fused = attend.run_fused(strict_operator, *tensors, mask, causal, 0.3)
    gradients = torch.autograd.grad(fused.square().sum(), tensors)
    plain = attention(*tensors, mask, causal, 0.3)
    torch.testing.assert_close(fused, plain)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain.square().sum(), tensors)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_fused_call_takes_the_default_scale_and_grouped_heads() -> None:
    q, k, v = _qkv(kv_heads=2)
    torch.testing.assert_close(attend.run_fused(strict_operator, q, k, v, None, False, None), attention(q, k, v))


def _meta(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None, dtype=torch.float16, v_dtype=None
) -> Any:
    made = [torch.empty(shape, dtype=dtype, device="meta") for shape in (q, k, v or k)]
    made[2] = made[2].to(v_dtype or dtype)
    return made


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (_meta((2, 10, 4096, 64), (2, 10, 77, 64)), None),  # SDXL's cross attention over 77 tokens
        (_meta((2, 10, 4096, 64), (2, 10, 4096, 64), dtype=torch.bfloat16), None),
        (_meta((1, 1, 16384, 512), (1, 1, 16384, 512)), None),  # the VAE's
        (_meta((1, 256, 4, 768), (1, 64, 4, 768), (1, 64, 4, 512)), None),
        (_meta((1, 1, (1 << 20) + 1, 8), (1, 1, 4, 8)), f"{(1 << 20) + 1} positions"),
        (_meta((1, 1, 4, 769), (1, 1, 4, 769)), "head size 769 is above 768"),
        (_meta((1, 257, 4, 8), (1, 257, 4, 8)), "257 heads"),
        (_meta((1, 6, 4, 8), (1, 4, 4, 8)), "6 heads over 4"),
        (_meta((1, 1, 4, 8), (1, 1, 4, 16)), "head sizes 8, 16, 16"),
        (_meta((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 9)), "head sizes 8, 8, 9"),
        (_meta((1, 1, 4, 8), (1, 1, 4, 8), v_dtype=torch.float32), "torch.float16, torch.float16, torch.float32"),
        (_meta((1, 1, 4, 8), (1, 1, 4, 8), dtype=torch.float64), "float64"),
    ],
)
def test_limits_of_the_fused_operator(tensors: Any, told: str | None) -> None:
    found = why_not_fused(*tensors)
    assert found is None if told is None else told in (found or "")


@pytest.mark.parametrize(("version", "takes"), [("7.0.0", False), ("8.0.RC1", True), ("8.2.RC1", True), (None, False)])
def test_fp32_is_fused_from_cann_8_on(version: str | None, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend.host, "cann_version", lambda: version)
    attend.takes_fp32.cache_clear()
    try:
        tensors = _meta((1, 1, 4, 8), (1, 1, 4, 8), dtype=torch.float32)
        assert (why_not_fused(*tensors) is None) == takes
    finally:
        attend.takes_fp32.cache_clear()


def test_calls_are_counted_apart_where_a_backward_pass_computes_them_again() -> None:
    q, k, v = (x.requires_grad_() for x in _qkv())
    with counting() as calls:
        out = torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)
        attention(q, k, v)
        out.sum().backward()
    assert calls == {"sdpa (on cpu)": 2, "recomputed sdpa (on cpu)": 1}


def test_counting_breaks_no_graph_and_makes_no_second_one() -> None:
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    with counting() as calls:
        inside = compiled(*_qkv())
    torch.testing.assert_close(inside, compiled(*_qkv()))
    assert not calls and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_counts_are_summed_up_and_said() -> None:
    found = {"fused": 5, "recomputed fused": 3, "sdpa (fp32 (of the VAE))": 2, "sdpa (on cpu)": 4, "geglu plain": 7}
    calls = AttentionCalls.of(found)
    why = {"fp32 (of the VAE)": 2, "on cpu": 4}
    assert calls.record() == {"fused": 5, "sdpa": 6, "recomputed": 3, "why": why}
    assert names(calls.sentence(), "11 calls", "5 fused", "4 not: on cpu", "2 not: fp32 (of the VAE)", "3 more")
    assert AttentionCalls.of({"fused": 2}).sentence() == "2 calls, all fused"
    assert AttentionCalls.of({"sdpa (on cpu)": 2}).sentence() == "2 calls, none fused (2 not: on cpu)"
    assert [kind for kind in found if not AttentionCalls.counts(kind)] == ["geglu plain"]
