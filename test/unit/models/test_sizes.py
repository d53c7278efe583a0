"""What is known of encoders without their classes: what those take, what they fall back to, how many parameters come of it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from diffusers import AutoencoderKL
from sd3 import PARTS, of_sizes, sizes_of
from sd3 import config as sd3_config
from sdxl import source
from transformers import CLIPTextConfig, T5Config

from difftrain.contracts import ConfigFault
from difftrain.models.build import BY_CLASS, CLIP, T5, VAE, decisive
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.registry import FAMILIES

LIBRARY = Path(__file__).parents[3] / "library"


def test_the_tables_are_what_the_classes_take() -> None:
    """Of transformers' configurations what decides is compared; diffusers' constructor has nothing else."""
    for kind, config in ((CLIP, CLIPTextConfig()), (T5, T5Config())):
        for key in {*kind.decisive, *kind.needed}:
            assert getattr(config, key) == kind.defaults[key], key
    taken = dict(inspect.signature(AutoencoderKL.__init__).parameters)
    del taken["self"]
    assert {key: each.default for key, each in taken.items()} == VAE.defaults
    assert all({*kind.needed, *kind.decisive} <= kind.defaults.keys() for kind in BY_CLASS.values())


def test_what_decides_is_told_whether_it_is_written_down_or_not() -> None:
    given = {"block_out_channels": (8, 16), "latent_channels": 4, "layers_per_block": 1, "scaling_factor": 0.5}
    found = decisive("diffusers:AutoencoderKL", given)
    assert found == decisive(
        "diffusers:AutoencoderKL", given | {"act_fn": "silu", "scaling_factor": 0.7, "sample_size": 64}
    )
    assert found["block_out_channels"] == [8, 16] and found["mid_block_add_attention"] is True
    assert found != decisive("diffusers:AutoencoderKL", given | {"act_fn": "relu"})
    assert decisive("transformers:CLIPTextModel", {"odd": 1})["odd"] == 1


@pytest.mark.parametrize("flavor", FAMILIES["sd3"].sizes)
def test_parameters_are_counted_without_the_class(flavor: str) -> None:
    source = SD3Family(sd3_config(init_from_config=flavor)).source
    for part in PARTS[1:]:
        assert source.count(part) == sum(each.numel() for each in source.build(part).parameters()), part


@pytest.mark.parametrize("flavor", FAMILIES["sdxl"].sizes)
def test_parameters_of_sdxls_encoders_are_counted_without_the_class(flavor: str) -> None:
    made = source(flavor)
    for part in ("vae", "text_encoder_1", "text_encoder_2"):
        assert made.count(part) == sum(each.numel() for each in made.build(part).parameters()), part


def test_a_plain_t5_and_a_vae_of_another_design_are_counted_too(tmp_path: Path) -> None:
    tiny = sizes_of("tiny")
    tiny["text_encoder_3"] |= {"feed_forward_proj": "relu"}
    tiny["vae"] |= {"use_quant_conv": False, "use_post_quant_conv": False, "layers_per_block": 2}
    architecture = of_sizes(tiny, tmp_path).source
    for part in ("vae", "text_encoder_3"):
        assert architecture.count(part) == sum(each.numel() for each in architecture.build(part).parameters())


def test_sizes_that_make_no_model_are_named_by_a_count_too() -> None:
    made = source()
    made = replace(made, sizes={**made.sizes, "vae": made.sizes["vae"] | {"layers_per_block": "two"}})
    for action in (made.count, made.build):
        with pytest.raises(ConfigFault, match=r"the .*of vae"):
            action("vae")
