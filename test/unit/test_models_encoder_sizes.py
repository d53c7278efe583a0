"""What is known of encoders without their classes: what those take, what they fall back to, how many parameters come of it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, T5Config

from difftrain.contracts import ConfigFault
from difftrain.models.parts.encoder_sizes import CLIP, ENCODERS, T5, VAE, known_keys, told
from difftrain.models.sd3 import architecture as sd3
from difftrain.models.sdxl import architecture as sdxl

LIBRARY = Path(__file__).parents[2] / "library"


def test_the_tables_are_what_the_classes_take() -> None:
    """Of transformers' configurations what decides is compared; diffusers' constructor has nothing else."""
    for kind, config in ((CLIP, CLIPTextConfig()), (T5, T5Config())):
        for key in {*kind.decisive, *kind.needed}:
            assert getattr(config, key) == kind.defaults[key], key
    taken = dict(inspect.signature(AutoencoderKL.__init__).parameters)
    del taken["self"]
    assert {key: each.default for key, each in taken.items()} == VAE.defaults
    assert all({*kind.needed, *kind.decisive} <= kind.defaults.keys() for kind in ENCODERS.values())


def test_what_decides_is_told_whether_it_is_written_down_or_not() -> None:
    given = {"block_out_channels": (8, 16), "latent_channels": 4, "layers_per_block": 1, "scaling_factor": 0.5}
    found = told("vae", given)
    assert found == told("vae", given | {"act_fn": "silu", "scaling_factor": 0.7, "sample_size": 64})
    assert found["block_out_channels"] == [8, 16] and found["mid_block_add_attention"] is True
    assert found != told("vae", given | {"act_fn": "relu"})
    assert told("text_encoder_1", {"odd": 1})["odd"] == 1


def test_the_class_of_the_vae_is_asked_only_about_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer:
        def __init__(self, in_channels: int = 3, newest: int = 1) -> None:
            """Take something that the table has not."""

    import diffusers

    with monkeypatch.context() as patch:
        patch.setattr(diffusers, "AutoencoderKL", None)
        assert known_keys("vae", ("in_channels", "_class_name")) == set(VAE.defaults)
        assert known_keys("text_encoder_2", ("odd",)) == set(CLIP.defaults)
    monkeypatch.setattr(diffusers, "AutoencoderKL", Newer)
    assert known_keys("vae", ("newest",)) == {"newest", *VAE.defaults}


FLAVORS = [*((sd3, name) for name in sd3.FLAVORS), *((sdxl, name) for name in sdxl.FLAVORS)]


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_parameters_are_counted_without_the_class(family: Any, flavor: str) -> None:
    architecture = family.named(flavor)
    for part in family.PARTS[1:]:
        assert architecture.count(part) == sum(each.numel() for each in architecture.build(part).parameters()), part


def test_a_plain_t5_and_a_vae_of_another_design_are_counted_too() -> None:
    tiny = sd3.named("tiny").to_dict()
    tiny["text_encoder_3"] |= {"feed_forward_proj": "relu"}
    tiny["vae"] |= {"use_quant_conv": False, "use_post_quant_conv": False, "layers_per_block": 2}
    architecture = sd3.Architecture.from_dict(tiny, "here")
    for part in ("vae", "text_encoder_3"):
        assert architecture.count(part) == sum(each.numel() for each in architecture.build(part).parameters())


def test_sizes_that_make_no_model_are_named_by_a_count_too() -> None:
    tiny = sdxl.named("tiny").to_dict()
    tiny["vae"] = tiny["vae"] | {"layers_per_block": "two"}
    architecture = sdxl.Architecture.from_dict(tiny, "here")
    for action in (architecture.count, architecture.build):
        with pytest.raises(ConfigFault, match="the sizes of vae"):
            action("vae")


@pytest.mark.parametrize("family", ["sd3", "sdxl"])
def test_reading_sizes_imports_no_class(family: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(LIBRARY)!r})\n"
        f"from difftrain.models.{family} import architecture\n"
        "architecture.known_keys = lambda part, given: set(given)\n"
        "made = architecture.named('tiny')\n"
        "told = [(made.told(part), made.count(part)) for part in architecture.PARTS[1:]]\n"
        "assert len(told) >= 3 and not {'transformers', 'diffusers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
