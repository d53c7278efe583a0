"""Attention: against the textbook, against diffusers, and its NPU side against a strict model of the operator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import Attention, AttnAddedKVProcessor2_0, AttnProcessor2_0

from difftrain.device import attend, attention, choose, counting, use_attention, why_not_fused
from difftrain.device.processor import AttentionProcessor


def _qkv(b: int = 2, n: int = 4, s: int = 5, t: int = 7, d: int = 8, kv_heads: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((b, n, s, d), (b, kv_heads or n, t, d), (b, kv_heads or n, t, d))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def _textbook(q, k, v, mask=None, causal=False, scale=None) -> torch.Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if causal:
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        scores = scores.masked_fill(columns > rows, -math.inf)
    return scores.softmax(-1) @ v


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
    b, n, s, d = query.shape
    t = key.shape[2]
    assert input_layout == "BNSD" and head_num == n and 0 < keep_prob <= 1 and d == key.shape[3] >= value.shape[3]
    assert query.dtype == key.dtype == value.dtype
    keep = None
    if atten_mask is not None:
        assert atten_mask.dtype in (torch.bool, torch.uint8)
        if sparse_mode == 2:
            assert atten_mask.shape == (2048, 2048) and torch.equal(atten_mask, torch.ones(2048, 2048).bool().triu(1))
            keep = torch.ones(s, t).bool().tril()
        else:
            assert sparse_mode == 0
            assert tuple(atten_mask.shape) in {(s, t), (1, 1, s, t), (b, 1, s, t), (b, n, s, t)}, atten_mask.shape
            keep = ~atten_mask.bool()
    return _textbook(query, key, value, keep, False, scale), None, None, None, 0, 0, 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
def test_the_fused_call_means_the_same(shape: Any, causal: bool) -> None:
    tensors = [x.requires_grad_() for x in _qkv()]
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
        (_meta((1, 1, 4, 769), (1, 1, 4, 769)), "head size 769 is above 768"),
        (_meta((1, 257, 4, 8), (1, 257, 4, 8)), "257 heads"),
        (_meta((1, 6, 4, 8), (1, 4, 4, 8)), "6 heads over 4"),
        (_meta((1, 1, 4, 8), (1, 1, 4, 16)), "head sizes 8, 16, 16"),
        (_meta((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 9)), "head sizes 8, 8, 9"),
        (_meta((1, 1, 4, 8), (1, 1, 4, 8), v_dtype=torch.float32), "differ in dtype"),
        (_meta((1, 1, 4, 8), (1, 1, 4, 8), dtype=torch.float64), "float64 is not taken"),
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


MODULES = {
    "self": ({"query_dim": 32}, {}),
    "cross": ({"query_dim": 32, "cross_attention_dim": 24}, {"encoder_hidden_states": (2, 7, 24)}),
    "group norm, residual, 4-D": (
        {
            "query_dim": 32,
            "norm_num_groups": 8,
            "residual_connection": True,
            "rescale_output_factor": 1.5,
            "bias": True,
        },
        {"hidden_states": (2, 32, 3, 5)},
    ),
    "normed context": (
        {"query_dim": 32, "cross_attention_dim": 24, "cross_attention_norm": "layer_norm"},
        {"encoder_hidden_states": (2, 7, 24)},
    ),
    "normed q and k": ({"query_dim": 32, "qk_norm": "layer_norm"}, {}),
    "spatial norm": (
        {"query_dim": 32, "spatial_norm_dim": 4, "residual_connection": True},
        {"hidden_states": (2, 32, 3, 5), "temb": (2, 4, 3, 5)},
    ),
}


@pytest.mark.parametrize("masking", ["none", "bool", "float", "float, per query"])
@pytest.mark.parametrize(("made_of", "inputs"), MODULES.values(), ids=MODULES.keys())
def test_the_processor_equals_diffusers(made_of: dict[str, Any], inputs: dict[str, Any], masking: str) -> None:
    torch.manual_seed(0)
    module = Attention(heads=4, dim_head=8, **made_of)
    given = {name: torch.randn(shape) for name, shape in {"hidden_states": (2, 15, 32), **inputs}.items()}
    length = given["encoder_hidden_states"].shape[1] if "encoder_hidden_states" in given else 15
    if masking != "none":
        keep = _mask(2, 1, length) if masking != "float, per query" else _mask(2, 15, length)
        given["attention_mask"] = keep if masking == "bool" else (1 - keep.float()) * -10000.0
    assert isinstance(module.processor, AttnProcessor2_0)
    theirs = module(**given)
    module.set_processor(AttentionProcessor())
    torch.testing.assert_close(module(**given), theirs, rtol=0, atol=1e-6)


def _unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=16,
        attention_head_dim=(2, 4),
        norm_num_groups=8,
        use_linear_projection=True,
    )


@pytest.mark.flags("enable_npu_flash_attention")
def test_a_unet_and_a_vae_compute_the_same() -> None:
    unet, cpu = _unet(), choose("cpu")
    x, t, context = torch.randn(2, 4, 8, 8), torch.tensor([3, 700]), torch.randn(2, 7, 16)
    keep = torch.ones(2, 7)
    keep[1, 3:] = 0
    theirs = unet(x, t, context, encoder_attention_mask=keep).sample
    sentence = use_attention(unet, cpu)
    blocks = sum(type(m).__name__ == "BasicTransformerBlock" for m in unet.modules())
    assert sentence == f"attention: torch's scaled_dot_product_attention on cpu, in {2 * blocks} modules"
    with counting() as calls:
        ours = unet(x, t, context, encoder_attention_mask=keep).sample
    assert calls == {"sdpa": 2 * blocks}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)

    vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    image = torch.randn(1, 3, 16, 16)
    theirs = vae(image).sample
    assert use_attention(vae, cpu).endswith("in 2 modules")
    torch.testing.assert_close(vae(image).sample, theirs, rtol=0, atol=1e-6)


def test_modules_of_another_kind_are_left_alone() -> None:
    module = Attention(query_dim=32, heads=4, dim_head=8, added_kv_proj_dim=16, norm_num_groups=8)
    module.set_processor(AttnAddedKVProcessor2_0())
    unscaled = Attention(query_dim=32, heads=4, dim_head=8, scale_qk=False)
    before = unscaled.processor
    assert use_attention(torch.nn.ModuleList([module, unscaled]), choose("cpu")).endswith("in 0 modules")
    assert isinstance(module.processor, AttnAddedKVProcessor2_0) and unscaled.processor is before


class _Npu:
    kind = "npu"


@pytest.mark.parametrize(
    ("device", "asked", "told", "fused"),
    [
        (
            "cpu",
            {"fused": True},
            "torch's scaled_dot_product_attention on cpu (--enable_npu_flash_attention asked for)",
            False,
        ),
        ("cpu", {"choice": "xformers"}, "torch's scaled_dot_product_attention on cpu (--xformers asked for)", False),
        ("cpu", {"choice": "mem_eff"}, "torch's scaled_dot_product_attention on cpu (--mem_eff_attn asked for)", False),
        ("npu", {"precision": "fp16"}, "npu_fusion_attention where its limits allow", True),
        (
            "npu",
            {"precision": "bf16", "choice": "sdpa"},
            "torch's scaled_dot_product_attention on npu (--sdpa asked for)",
            False,
        ),
        (
            "npu",
            {"precision": "bf16", "choice": "sdpa", "fused": True},
            "npu_fusion_attention where its limits allow (--enable_npu_flash_attention, --sdpa asked for)",
            True,
        ),
        (
            "npu",
            {"fused": True},
            "torch's scaled_dot_product_attention on npu in fp32, which this CANN does not fuse",
            True,
        ),
    ],
)
def test_the_choice_is_said(device: str, asked: dict[str, Any], told: str, fused: bool) -> None:
    unet = _unet()
    sentence = use_attention(unet, _Npu() if device == "npu" else choose("cpu"), **asked)
    assert sentence.startswith(f"attention: {told}")
    assert {p.fused for p in unet.attn_processors.values()} == {fused}
