"""Floating-point operations: blocks and sizes that are reckoned are those that torch counts one by one."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, ON_KIT, ORACLES, Tiny, bucket_of, config, made, needs_blocks
from torch.utils.flop_counter import FlopCounterMode

from difftrain.contracts import Bucket
from difftrain.models.flops import blank_inputs, on_meta

# families whose lists of blocks differ in kind; those that are built alike, and take seconds each, are counted nightly
DEEPER = ("sd3", "flux", "wan")
kinds = pytest.mark.parametrize(
    "name", [one if one in DEEPER else pytest.param(one, marks=pytest.mark.nightly) for one in ON_KIT], indirect=True
)


def counted(family: Any, bucket: Bucket) -> int:
    """Count a whole pass, all blocks at the very size, on the meta device."""
    inputs, root = blank_inputs(family, bucket), on_meta(family)
    with FlopCounterMode(display=False) as counter:
        outputs = root(inputs.x_t, inputs.timestep, inputs.conditions)
        torch.stack([each.sum() for each in outputs if each.requires_grad]).sum().backward()
    return counter.get_total_flops()


def sizes_of(name: str) -> dict[str, Any]:
    """Return the shipped sizes of the tiny model, as a file has them."""
    found = resources.files("difftrain.models").joinpath("sizes_shipped", f"{name}.tiny.json")
    return json.loads(found.read_text("utf-8"))


def from_file(name: str, folder: Path, content: dict[str, Any], **model: Any) -> Any:
    """Make a family of sizes of one's own."""
    (folder / "sizes.json").write_text(json.dumps(content))
    return made(config(name, init_from_config=str(folder / "sizes.json"), **model))


def test_the_tiny_size(name: str, tiny: Tiny) -> None:
    bucket = bucket_of(name)
    assert tiny.family.flops_per_sample(tiny.parts, bucket) == counted(tiny.family, bucket)


@kinds
def test_a_deeper_model_at_an_odd_size(name: str, tiny: Tiny, tmp_path: Path) -> None:
    needs_blocks(tiny)
    content, part = sizes_of(name), FAMILIES[name].denoiser
    depths = [key for key in content[part] if re.fullmatch(r"(num|n)_(\w+_)?layers", key)]
    assert depths, "which of its sizes count blocks?"
    content[part] |= {key: 4 + place for place, key in enumerate(depths)}
    content[part] |= ORACLES[name].by_depth(sum(content[part][key] for key in depths))
    family = from_file(name, tmp_path, content)
    token, frames = family.token, bucket_of(name).frames
    bucket = Bucket(5 * token, 7 * token, frames)
    assert family.flops_per_sample(None, bucket) == counted(family, bucket)


@kinds
def test_held_weights_need_no_gradient_of_their_own(name: str, fresh: Any, tiny: Tiny) -> None:
    if "model.train_only" not in FAMILIES[name].takes:
        pytest.skip("the family trains all of its denoiser")
    last = tiny.family.units(tiny.parts)[-1][0].partition(".")[2]
    part = fresh(train_only=(re.escape(last),))
    bucket = bucket_of(name)
    assert part.family.flops_per_sample(part.parts, bucket) == counted(part.family, bucket)
    assert part.family.flops_per_sample(part.parts, bucket) < tiny.family.flops_per_sample(tiny.parts, bucket)


def test_flux_dev_at_1024_is_what_its_layers_say(tmp_path: Path) -> None:
    content = sizes_of("flux") | {"transformer": {"guidance_embeds": True}}
    content["text_encoder"]["hidden_size"], content["text_encoder_2"]["d_model"] = 768, 4096
    family = from_file("flux", tmp_path, content, t5_max_length=512)

    width, image, text = 3072, 4096, 512
    tokens = image + text

    def linear(rows: int, entering: int, leaving: int) -> int:
        return 2 * rows * entering * leaving

    attention = 4 * tokens * tokens * width
    # no gradient goes on to what enters: these layers cost twice, all others three times
    entering = linear(image, 64, width) + linear(text, 4096, width) + 2 * linear(1, 256, width) + linear(1, 768, width)
    double = 2 * linear(1, width, 6 * width) + linear(tokens, width, 12 * width) + attention
    single = linear(1, width, 3 * width) + linear(tokens, width, 7 * width) + linear(tokens, 5 * width, width)
    inner = 3 * linear(1, width, width) + 19 * double + 38 * (single + attention)
    inner += linear(1, width, 2 * width) + linear(image, width, 64)
    by_hand = 3 * inner + 2 * entering

    found = family.flops_per_sample(None, Bucket(1024, 1024))
    assert found == by_hand and f"{found:.6g}" == "2.23139e+14"
