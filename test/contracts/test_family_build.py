"""Hollow builds: parameters have no memory, every computed table is real and as a normal build makes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import Tiny

from difftrain.models.build import build, class_of, is_transformers

# what the twenty families of diffusion-pipe need of diffusers, with sizes where a class has none of its own
_HIDREAM = {
    "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 1, "num_single_layers": 1,
    "attention_head_dim": 16, "num_attention_heads": 2, "caption_channels": [16, 16], "text_emb_dim": 16,
    "num_routed_experts": 2, "num_activated_experts": 1, "axes_dims_rope": (8, 4, 4), "max_resolution": (8, 8),
    "llama_layers": [0, 1],
}  # fmt: skip
_HUNYUAN_IMAGE_VAE = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 64, "block_out_channels": (64, 128), "layers_per_block": 1,
    "spatial_compression_ratio": 2, "sample_size": 64,
}  # fmt: skip
CLASSES: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {},
    "SD3Transformer2DModel": {},
    "FluxTransformer2DModel": {},
    "Flux2Transformer2DModel": {},
    "ChromaTransformer2DModel": {},
    "LTXVideoTransformer3DModel": {},
    "LTX2VideoTransformer3DModel": {},
    "HunyuanVideoTransformer3DModel": {},
    "HunyuanVideo15Transformer3DModel": {},
    "HunyuanImageTransformer2DModel": {},
    "CosmosTransformer3DModel": {},
    "Lumina2Transformer2DModel": {},
    "WanTransformer3DModel": {},
    "HiDreamImageTransformer2DModel": _HIDREAM,
    "QwenImageTransformer2DModel": {},
    "AuraFlowTransformer2DModel": {},
    "ZImageTransformer2DModel": {},
    "AutoencoderKL": {},
    "AutoencoderKLWan": {},
    "AutoencoderKLQwenImage": {},
    "AutoencoderKLHunyuanVideo": {},
    "AutoencoderKLHunyuanVideo15": {},
    "AutoencoderKLHunyuanImage": _HUNYUAN_IMAGE_VAE,
    "AutoencoderKLCosmos": {},
    "AutoencoderKLLTXVideo": {},
    "AutoencoderKLLTX2Video": {},
    "AutoencoderKLFlux2": {},
}


def tables(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a module that is no parameter: buffers, plain attributes, and those within lists."""
    for place, each in module.named_modules():
        for key, value in vars(each).items():
            inner = value if isinstance(value, list | tuple) else [value]
            yield from ((f"{place}.{key}", one) for one in inner if isinstance(one, torch.Tensor))
        yield from ((f"{place}.{key}", one) for key, one in each._buffers.items() if one is not None)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_of_diffusers_builds_hollow(kind: str) -> None:
    module = build(f"diffusers:{kind}", "part", CLASSES[kind])
    sizes = {True: 0, False: 0}
    for each in module.parameters():
        sizes[each.is_meta] += each.numel()
    assert sizes[False] <= sizes[True] / 100, "what begins as ones or zeros is small: norms, tables of modulation"
    assert [name for name, value in tables(module) if value.is_meta] == []


def test_every_part_has_the_tables_of_a_normal_build(tiny: Tiny) -> None:
    source = tiny.family.source
    for part in tiny.family.parts:
        hollow = source.build(part)
        made_from = class_of(tiny.family.parts[part])
        sizes = source.sizes[part]
        of_transformers = is_transformers(tiny.family.parts[part])
        normal = made_from(made_from.config_class(**sizes)) if of_transformers else made_from(**sizes)
        ours, theirs = dict(tables(hollow)), dict(tables(normal))
        assert ours.keys() == theirs.keys()
        assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
        shapes = {name: value.shape for name, value in normal.state_dict().items()}
        assert {name: value.shape for name, value in hollow.state_dict().items()} == shapes


def test_a_loaded_model_has_no_tensor_without_memory(tiny: Tiny) -> None:
    for part, module in {tiny.family.denoiser: tiny.net, **tiny.parts.frozen}.items():
        left = [name for name, value in (*module.named_parameters(), *tables(module)) if value.is_meta]
        assert left == [], part


def test_one_seed_makes_the_same_bits(fresh: Any) -> None:
    one, other = fresh(), fresh()
    assert all(torch.equal(value, other.weights()[name]) for name, value in one.weights().items())
    for part, module in one.parts.frozen.items():
        theirs = other.parts.frozen[part].state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in module.state_dict().items()), part
    assert float(one.loss().detach()) == float(other.loss().detach())


def test_another_seed_makes_another_model(fresh: Any, tiny: Tiny) -> None:
    other = fresh({"training": {"seed": 2}})
    assert any(not torch.equal(value, other.weights()[name]) for name, value in tiny.weights().items())
    assert float(other.loss().detach()) != float(tiny.loss().detach())
