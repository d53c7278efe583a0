"""Names of the original layout: a bijection at every size, with the shapes that it implies."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from difftrain.models.parts.places import Place
from difftrain.models.sdxl.architecture import PARTS, named
from difftrain.models.sdxl.convert import PREFIXES, original_places


@pytest.mark.parametrize("size", ["tiny", "demo"])
@pytest.mark.parametrize("part", PARTS)
def test_every_tensor_has_one_place_and_every_place_is_filled(size: str, part: str) -> None:
    module = named(size).build(part)
    places = original_places(part, module)
    assert set(places) == set(module.state_dict())
    slots = defaultdict(list)
    for place in places.values():
        assert place.key.startswith(PREFIXES[part])
        slots[place.key].append((place.index, place.count))
    for key, found in slots.items():
        count = found[0][1]
        assert sorted(found) == [(i, count) for i in range(count)], key


@pytest.mark.parametrize("part", PARTS)
def test_what_is_stored_comes_back(part: str) -> None:
    module = named("tiny").build(part)
    places = original_places(part, module)
    values = {
        n: torch.randn(v.shape, generator=torch.Generator().manual_seed(i))
        for i, (n, v) in enumerate(module.state_dict().items())
    }
    pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name in sorted(places, key=lambda n: places[n].index):
        pieces[places[name].key].append(places[name].stored(values[name]))
    for name, place in places.items():
        stored = torch.cat(pieces[place.key]) if place.count > 1 else pieces[place.key][0]
        assert tuple(stored.shape) == place.stored_shape(values[name].shape)
        assert place.restored(stored).equal(values[name]), name


def test_forms() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert Place("k", "transposed").stored(x).shape == (3, 2)
    assert Place("k", "conv").stored_shape(x.shape) == (2, 3, 1, 1)
    assert Place("k", index=1, count=3).stored_shape((4, 5)) == (12, 5)


@pytest.mark.parametrize(
    ("part", "name", "key"),
    [
        ("unet", "down_blocks.0.downsamplers.0.conv.weight", "input_blocks.3.0.op.weight"),
        ("unet", "down_blocks.1.attentions.1.transformer_blocks.0.attn2.to_k.weight", "input_blocks.5.1.transformer_blocks.0.attn2.to_k.weight"),
        ("unet", "down_blocks.2.resnets.0.conv_shortcut.bias", "input_blocks.7.0.skip_connection.bias"),
        ("unet", "mid_block.resnets.1.time_emb_proj.weight", "middle_block.2.emb_layers.1.weight"),
        ("unet", "up_blocks.0.upsamplers.0.conv.weight", "output_blocks.2.2.conv.weight"),
        ("unet", "up_blocks.2.resnets.2.norm2.bias", "output_blocks.8.0.out_layers.0.bias"),
        ("unet", "add_embedding.linear_2.weight", "label_emb.0.2.weight"),
        ("vae", "decoder.up_blocks.0.resnets.2.conv1.weight", "decoder.up.3.block.2.conv1.weight"),
        ("vae", "decoder.up_blocks.2.resnets.0.conv_shortcut.weight", "decoder.up.1.block.0.nin_shortcut.weight"),
        ("vae", "encoder.mid_block.attentions.0.to_out.0.weight", "encoder.mid.attn_1.proj_out.weight"),
        ("vae", "decoder.mid_block.resnets.0.norm1.weight", "decoder.mid.block_1.norm1.weight"),
        ("text_encoder_2", "text_model.encoder.layers.31.mlp.fc2.bias", "transformer.resblocks.31.mlp.c_proj.bias"),
        ("text_encoder_2", "text_model.encoder.layers.0.self_attn.k_proj.bias", "transformer.resblocks.0.attn.in_proj_bias"),
        ("text_encoder_2", "text_projection.weight", "text_projection"),
    ],
)  # fmt: skip
def test_names_of_sdxl_base(base_places: dict[str, dict[str, Place]], part: str, name: str, key: str) -> None:
    """Spot checks; the whole list is compared with an independent one in the integration tests."""
    assert base_places[part][name].key == PREFIXES[part] + key


@pytest.fixture(scope="module")
def base_places() -> dict[str, dict[str, Place]]:
    return {part: original_places(part, named("base").build(part)) for part in PARTS if part != "text_encoder_1"}
