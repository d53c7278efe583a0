"""Names of the original layout: a bijection at every size, with the shapes that it implies."""

from __future__ import annotations

import pytest
import torch
from sdxl import config

from difftrain.models.export import key_map
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.weights.keys import KeyMap, KeyPiece

PARTS = ("unet", "vae", "text_encoder_1", "text_encoder_2")


def maps(size: str, *parts: str) -> dict[str, KeyMap]:
    family = SDXLFamily(config(init_from_config=size))
    return {part: key_map(family, part) for part in parts or PARTS}


@pytest.mark.parametrize("size", ["tiny", "demo"])
@pytest.mark.parametrize("part", PARTS)
def test_every_tensor_has_one_place_and_every_place_is_filled(size: str, part: str) -> None:
    family = SDXLFamily(config(init_from_config=size))
    names = key_map(family, part)
    tensors = family.source.build(part).state_dict()
    assert set(names.pieces) == set(tensors)
    for key, members in names.members.items():
        rows = [tuple(tensors[name].shape) for name in members]
        starts = [names.pieces[name].start for name in members]
        assert starts == [sum(shape[0] for shape in rows[:i]) for i in range(len(rows))], key
        if len(members) > 1:
            assert names.stored[key] == (sum(shape[0] for shape in rows), *rows[0][1:])


@pytest.mark.parametrize("part", PARTS)
def test_what_is_stored_comes_back(part: str) -> None:
    names = maps("tiny", part)[part]
    values = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i))
        for i, (name, shape) in enumerate(names.shapes.items())
    }
    waiting: dict[str, torch.Tensor] = {}
    stored = {}
    for name in sorted(values, reverse=True):  # in any order
        if (joined := names.collected(name, values[name], waiting)) is not None:
            stored[names.pieces[name].key] = joined
    assert not waiting and {key: tuple(value.shape) for key, value in stored.items()} == names.stored
    for name, piece in names.pieces.items():
        assert names.restored(name, stored[piece.key]).equal(values[name]), name


def test_forms() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    forms = {
        "t": KeyPiece("t", form="transposed"),
        "c": KeyPiece("c", form="conv"),
        "a": KeyPiece("s"),
        "b": KeyPiece("s", 2),
    }
    names = KeyMap(dict.fromkeys(forms, (2, 3)), forms.__getitem__)
    assert names.stored == {"t": (3, 2), "c": (2, 3, 1, 1), "s": (4, 3)}
    assert names.joined("s", {"b": x, "a": -x}).equal(torch.cat([-x, x]))


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
def test_names_of_sdxl_base(base_maps: dict[str, KeyMap], part: str, name: str, key: str) -> None:
    """Spot checks; the whole list is compared with an independent one in the integration tests."""
    assert base_maps[part].pieces[name].key == key


@pytest.fixture(scope="module")
def base_maps() -> dict[str, KeyMap]:
    return maps("base", "unet", "vae", "text_encoder_2")
