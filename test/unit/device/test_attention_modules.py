"""Modules that attend, with the one attention function: equal to diffusers' own; and what is said of the choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    AutoencoderKL,
    CosmosTransformer3DModel,
    HiDreamImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    Lumina2Transformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import Attention, AttnAddedKVProcessor2_0, AttnProcessor2_0
from refusals import is_about

from difftrain.device import choose, counting, use_attention
from difftrain.device.attention_modules import AttentionProcessor


def _mask(*shape: int) -> torch.Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 0] = True  # no row without a key
    return mask


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
    "norm of q, k": ({"query_dim": 32, "qk_norm": "layer_norm"}, {}),
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
    assert calls["sdpa (on cpu)"] == 2 * blocks
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


def _sd3() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    module = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([3.0, 700.0]),
    }
    return module, inputs


def _aura_flow() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    module = AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "timestep": torch.tensor([0.1, 0.7]),
    }
    return module, inputs


def _lumina2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    module = Lumina2Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=32, num_layers=1, num_refiner_layers=1,
        num_attention_heads=4, num_kv_heads=2, multiple_of=8, axes_dim_rope=(4, 2, 2), axes_lens=(16, 16, 16),
        cap_feat_dim=16,
    )  # fmt: skip
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, 4:] = False
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_attention_mask": keep,
        "timestep": torch.tensor([0.1, 0.7]),
    }
    return module, inputs


def _hidream() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    module = HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=4, caption_channels=(16, 16), text_emb_dim=16, num_routed_experts=2,
        num_activated_experts=1, axes_dims_rope=(4, 2, 2), max_resolution=(8, 8), llama_layers=(0, 0),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timesteps": torch.tensor([3.0, 700.0]),
        "encoder_hidden_states_t5": torch.randn(2, 7, 16),
        "encoder_hidden_states_llama3": torch.randn(1, 2, 7, 16),
        "pooled_embeds": torch.randn(2, 16),
    }
    return module, inputs


def _cosmos() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    module = CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=12, num_layers=1, text_embed_dim=16,
        adaln_lora_dim=8, concat_padding_mask=False, extra_pos_embed_type=None,
    )  # fmt: skip
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, 4:] = False
    inputs = {
        "hidden_states": torch.randn(2, 4, 1, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "attention_mask": keep,
        "timestep": torch.tensor([0.1, 0.7]),
    }
    return module, inputs


def _hunyuan_video_15() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    module = HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=1, num_refiner_layers=1,
        text_embed_dim=16, text_embed_2_dim=12, image_embed_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    keep = torch.ones(2, 7)
    keep[1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(2, 9, 2, 4, 4), "timestep": torch.tensor([30.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 7, 16), "encoder_attention_mask": keep,
        "encoder_hidden_states_2": torch.randn(2, 7, 12), "encoder_attention_mask_2": keep.flip(0),
        "image_embeds": torch.zeros(2, 3, 8),
    }  # fmt: skip
    return module, inputs


@pytest.mark.parametrize(
    ("make", "attending"),
    [(_sd3, 3 + 1), (_aura_flow, 2), (_lumina2, 2 + 1), (_hidream, 2), (_cosmos, 2), (_hunyuan_video_15, 2)],
)
def test_transformers_with_processors_of_their_own_compute_the_same(make: Any, attending: int) -> None:
    torch.manual_seed(0)
    module, inputs = make()
    module.eval()
    theirs = module(**inputs).sample
    assert use_attention(module, choose("cpu")).endswith(f"in {attending} modules")
    with counting() as calls:
        ours = module(**inputs).sample
    assert calls["sdpa (on cpu)"] == attending
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class _Npu:
    kind = "npu"


@pytest.mark.parametrize(
    ("device", "asked", "facts", "fused"),
    [
        (
            "cpu",
            {"fused": True},
            ["scaled_dot_product_attention", "cpu", "--enable_npu_flash_attention"],
            False,
        ),
        ("cpu", {"choice": "xformers"}, ["scaled_dot_product_attention", "cpu", "--xformers"], False),
        ("cpu", {"choice": "mem_eff"}, ["scaled_dot_product_attention", "cpu", "--mem_eff_attn"], False),
        (
            "npu",
            {"precision": "fp16"},
            ["npu_fusion_attention", "npu", "--sdpa"],
            True,
        ),
        (
            "npu",
            {"precision": "bf16", "choice": "sdpa"},
            ["scaled_dot_product_attention", "npu", "--sdpa"],
            False,
        ),
        (
            "npu",
            {"precision": "bf16", "choice": "sdpa", "fused": True},
            ["npu_fusion_attention", "--enable_npu_flash_attention, --sdpa"],
            True,
        ),
        (
            "npu",
            {"fused": True},
            ["scaled_dot_product_attention", "npu in fp32", "CANN"],
            True,
        ),
    ],
)
def test_the_choice_is_said(device: str, asked: dict[str, Any], facts: list[str], fused: bool) -> None:
    module = Attention(query_dim=8, heads=2, dim_head=4)
    sentence = use_attention(module, _Npu() if device == "npu" else choose("cpu"), **asked)
    assert is_about(sentence, "attention", *facts, "1 modules")
    assert module.processor.fused == fused
