"""The sizes of SD3: what ships fits together, and of what does not everything is named at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sd3 import PARTS, config, of_sizes, sizes_of

from difftrain.contracts import ConfigFault
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.placeholder import fill
from difftrain.models.registry import FAMILIES
from difftrain.models.weights.find import shipped_sizes


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    content = copy.deepcopy(sizes_of("tiny"))
    for name, values in sections.items():
        content[name] |= values
    return content


def with_gamma(gamma: float, **model: Any) -> SD3Family:
    return SD3Family(config({"loss": {"text_recon_gamma": gamma}}, **model))


@pytest.mark.nightly
def test_light_is_medium_of_fifteen_blocks() -> None:
    light, medium = (SD3Family(config(init_from_config=name)) for name in ("light", "medium"))
    cut = SD3Family(config(init_from_config="medium", num_layers=15))
    assert cut.source.sizes == light.source.sizes and medium.source.num_layers == 24
    counts = [_count(with_gamma(gamma, init_from_config="light")) for gamma in (0, 0.1)]
    assert counts == [1_263_501_376, 1_263_501_376 + 1536 * 4 * 1537 + 9 * 1536**2 + 6 * 1536]
    assert round(counts[1] / 1e9, 2) == 1.29


def _count(family: SD3Family) -> int:
    return sum(param.numel() for param in family.source.build("transformer").parameters())


@pytest.mark.parametrize("name", FAMILIES["sd3"].sizes)
def test_what_ships_reads_as_it_is_written(name: str, tmp_path: Path) -> None:
    shipped, file = SD3Family(config(init_from_config=name)), tmp_path / "sizes.json"
    file.write_text(json.dumps(shipped.architecture()))  # as a run's checkpoints hold it
    again = SD3Family(config(init_from_config=str(file)))
    assert again.architecture() == shipped.architecture() and again.source.name == name
    written = {part: sizes_of(name)[part.removesuffix("_1")] for part in PARTS}
    assert json.loads(json.dumps(dict(again.source.sizes))) == json.loads(json.dumps(written))


def test_random_weights_are_the_seeds_and_the_positions_diffusers() -> None:
    for part in PARTS:
        one, other, third = (_filled(part, seed) for seed in (1, 1, 2))
        assert all(torch.equal(one[name], other[name]) for name in one)
        trained_by_us = part == "vae"
        assert trained_by_us == all(torch.equal(one[name], third[name]) for name in one), part
    from diffusers import SD3Transformer2DModel

    theirs: Any = SD3Transformer2DModel(**sizes_of("tiny")["transformer"])
    assert torch.equal(theirs.pos_embed.pos_embed, _filled("transformer", 1)["pos_embed.pos_embed"])


def _filled(part: str, seed: int) -> dict[str, Any]:
    source = SD3Family(config({"training": {"seed": seed}})).source
    module = source.build(part)
    fill(module, source.weights(part, module), torch.float32)
    return dict(module.state_dict())


def test_a_model_of_adaln_zero_begins_with_no_velocity(tmp_path: Path) -> None:
    source = of_sizes(sizes_of("tiny") | {"init": "adaln_zero"}, tmp_path).source
    module = source.build("transformer")
    fill(module, source.weights("transformer", module), torch.float32)
    found = module(torch.randn(1, 16, 8, 8), torch.randn(1, 5, 64), torch.randn(1, 48), torch.tensor([500.0])).sample
    assert not found.any() and module.context_embedder.weight.any()


def test_every_mismatch_is_named_at_once(tmp_path: Path) -> None:
    wrong = changed(
        transformer={
            "joint_attention_dim": 40, "pooled_projection_dim": 1, "caption_projection_dim": 60, "in_channels": 4,
            "out_channels": 8, "sample_size": 17, "pos_embed_max_size": 2, "dual_attention_layers": [7],
        },
        text_encoder={"max_position_embeddings": 76},
        text_encoder_2={"num_attention_heads": 3},
    )  # fmt: skip
    with pytest.raises(ConfigFault) as found:
        of_sizes(wrong, tmp_path).load(meta=True)
    told = str(found.value)
    for said in (
        "[transformer] joint_attention_dim: is 40, must be 64", "pooled_projection_dim: is 1, must be 48",
        "caption_projection_dim: is 60, must be 64", "in_channels: is 4, must be 16", "out_channels: is 8, must be 16",
        "max_position_embeddings: is 77, must be 76",
        "[text_encoder] hidden_size: is 24, with text_encoder_2's 56: ", "joint_attention_dim 40",
        "pos_embed_max_size: is 2", "sample_size: is 17", " patch_size 2", "names block [7]",
        " num_attention_heads 3",
    ):  # fmt: skip
        assert said in told, said
    assert len(found.value.faults) == 11


def test_keys_and_kinds_are_judged_in_every_section_at_once(tmp_path: Path) -> None:
    wrong = changed(
        transformer={"num_layers": "three", "hedas": 3}, text_encoder_3={"d_model": None}, vae={"latent_channels": 0}
    )
    wrong |= {"text_encoder_4": {}, "init": "zero"}
    with pytest.raises(ConfigFault) as found:
        of_sizes(wrong, tmp_path).load(meta=True)
    told = str(found.value)
    for said in (
        "'text_encoder_4'", "'hedas'", "'d_model'", "num_layers: is 'three'",
        "latent_channels: is 0", "init: is 'zero'",
    ):  # fmt: skip
        assert said in told, said
    with pytest.raises(ConfigFault, match=r"has .*section 'vae'"):
        of_sizes({key: value for key, value in changed().items() if key != "vae"}, tmp_path).load(meta=True)
    bare = {key: value for key, value in sizes_of("tiny")["transformer"].items() if key != "num_layers"}
    with pytest.raises(ConfigFault, match="'num_layers' is missing"):
        of_sizes(sizes_of("tiny") | {"transformer": bare}, tmp_path).load(meta=True)


def test_sizes_that_make_no_model_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigFault, match=r"\bvae: "):
        of_sizes(changed(vae={"norm_num_groups": 7}), tmp_path).load(meta=True)


@pytest.mark.parametrize("choice", ["huge", "none.json"])
def test_a_size_that_is_not_there_is_said(choice: str) -> None:
    with pytest.raises(ConfigFault, match=rf"--init_from_config: .*'{choice}'.*light, medium, medium35, large35, tiny"):
        shipped_sizes(SD3Family(config()), choice)
