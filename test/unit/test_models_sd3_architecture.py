"""The sizes of SD3: what ships fits together, and of what does not everything is named at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from difftrain.contracts import ConfigFault
from difftrain.models.parts.materialise import fill
from difftrain.models.sd3.architecture import FLAVORS, PARTS, Architecture, named, of_depth, read_architecture
from difftrain.models.sd3.sources import RandomSource, positions


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    content = copy.deepcopy(named("tiny").to_dict())
    for name, values in sections.items():
        content[name] |= values
    return content


def test_light_is_medium_of_fifteen_blocks() -> None:
    light, medium = named("light"), named("medium")
    assert of_depth(medium, 15).transformer == light.transformer and medium.num_layers == 24
    assert {part: getattr(light, part) for part in PARTS[1:]} == {part: getattr(medium, part) for part in PARTS[1:]}
    counts = {branch: _count(Architecture(**(vars(light) | {"text_branch": branch}))) for branch in (False, True)}
    assert counts == {False: 1_263_501_376, True: 1_263_501_376 + 1536 * 4 * 1537 + 9 * 1536**2 + 6 * 1536}
    assert round(counts[True] / 1e9, 2) == 1.29


def _count(architecture: Architecture) -> int:
    return sum(param.numel() for param in architecture.build("transformer").parameters())


@pytest.mark.parametrize("name", FLAVORS)
def test_what_ships_reads_as_it_is_written(name: str, tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(named(name).to_dict()))
    assert read_architecture(str(file)) == read_architecture(name) == named(name)


def test_random_weights_are_the_seeds_and_the_positions_diffusers() -> None:
    architecture = named("tiny")
    for part in PARTS:
        one, other, third = (_filled(architecture, part, seed) for seed in (1, 1, 2))
        assert all(torch.equal(one[name], other[name]) for name in one)
        trained_by_us = part == "vae"
        assert trained_by_us == all(torch.equal(one[name], third[name]) for name in one), part
    from diffusers import SD3Transformer2DModel

    theirs: Any = SD3Transformer2DModel(**architecture.transformer)
    assert torch.equal(theirs.pos_embed.pos_embed, positions(architecture))


def _filled(architecture: Architecture, part: str, seed: int) -> dict[str, Any]:
    module = architecture.build(part)
    source = RandomSource(architecture, seed)
    fill(module, source.weights(part, module), torch.float32)
    return dict(module.state_dict())


def test_a_model_of_adaln_zero_begins_with_no_velocity() -> None:
    architecture = Architecture.from_dict(named("tiny").to_dict() | {"init": "adaln_zero"}, "here")
    module = architecture.build("transformer")
    fill(module, RandomSource(architecture, 1).weights("transformer", module), torch.float32)
    found = module(torch.randn(1, 16, 8, 8), torch.randn(1, 5, 64), torch.randn(1, 48), torch.tensor([500.0])).sample
    assert not found.any() and module.context_embedder.weight.any()


def test_every_mismatch_is_named_at_once() -> None:
    wrong = changed(
        transformer={
            "joint_attention_dim": 40, "pooled_projection_dim": 1, "caption_projection_dim": 60, "in_channels": 4,
            "out_channels": 8, "sample_size": 17, "pos_embed_max_size": 2, "dual_attention_layers": [7],
        },
        text_encoder={"max_position_embeddings": 76},
        text_encoder_2={"num_attention_heads": 3},
    )  # fmt: skip
    with pytest.raises(ConfigFault) as found:
        Architecture.from_dict(wrong, "sizes.json")
    told = str(found.value)
    for said in (
        "joint_attention_dim: is 40, must be 64", "pooled_projection_dim: is 1, must be 48",
        "caption_projection_dim: is 60, must be 64", "in_channels: is 4, must be 16", "out_channels: is 8, must be 16",
        "max_position_embeddings: is 77, must be 76", "more than joint_attention_dim 40", "pos_embed_max_size: is 2",
        "sample_size: is 17", "names block [7]", "a multiple of num_attention_heads 3",
    ):  # fmt: skip
        assert said in told, said
    assert len(found.value.faults) == 11


def test_keys_and_kinds_are_judged_in_every_section_at_once() -> None:
    wrong = changed(
        transformer={"num_layers": "three", "hedas": 3}, text_encoder_3={"d_model": None}, vae={"latent_channels": 0}
    )
    wrong |= {"text_encoder_4": {}, "init": "zero"}
    with pytest.raises(ConfigFault) as found:
        Architecture.from_dict(wrong, "sizes.json")
    told = str(found.value)
    for said in (
        "unknown section 'text_encoder_4'", "unknown key 'hedas'", "'d_model' is missing", "num_layers: is 'three'",
        "latent_channels: is 0", "init: is 'zero'",
    ):  # fmt: skip
        assert said in told, said
    with pytest.raises(ConfigFault, match="has no section 'vae'"):
        Architecture.from_dict({key: value for key, value in changed().items() if key != "vae"}, "sizes.json")


def test_sizes_that_make_no_model_are_said() -> None:
    wrong = changed(vae={"norm_num_groups": 7})
    with pytest.raises(ConfigFault, match="the sizes of vae: make no model"):
        Architecture.from_dict(wrong, "sizes.json").build("vae")


@pytest.mark.parametrize("choice", ["huge", "none.json"])
def test_a_size_that_is_not_there_is_said(choice: str) -> None:
    with pytest.raises(ConfigFault, match=r"there is no file .*light, medium, tiny"):
        read_architecture(choice)
