"""Floating-point operations: equal to torch's counter, and the published figure of SD3-Light at 256 px."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sd3 import T5_LENGTH, batch_of, config, loaded, of_sizes, sizes_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from difftrain.contracts import Bucket
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.flops import flops_per_sample
from difftrain.models.text.clip_vocabulary import LENGTH


def counted(run: Callable[[], object]) -> int:
    """Count with attention taken apart into its products: the counter does not know the fused kernel of the CPU."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


def total(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum(each.sum() for each in outputs if each.requires_grad)


@pytest.mark.parametrize("size", [(64, 64), (32, 96), (160, 64)])
@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_tiny(size: tuple[int, int], gamma: float) -> None:
    family, parts = loaded(config({"loss": {"text_recon_gamma": gamma}}))
    inputs = family.inputs(batch_of(family, parts, ["a"], *size), parts)
    found = counted(lambda: total(family.forward(parts.root, inputs)).backward())
    assert found == family.flops_per_sample(parts, Bucket(*size))


def by_counter(family: SD3Family, side: int, t5_length: int) -> int:
    """Count a pass of diffusers' own over empty tensors."""
    meta = torch.device("meta")
    model: Any = family.source.build("transformer").to(meta)
    config = family.sizes
    arguments = (
        torch.empty(1, config["in_channels"], side // 8, side // 8, device=meta),
        torch.empty(1, LENGTH + t5_length, config["joint_attention_dim"], device=meta),
        torch.empty(1, config["pooled_projection_dim"], device=meta),
        torch.zeros(1, device=meta),
    )
    return counted(lambda: model(*arguments, return_dict=False)[0].sum().backward())


def test_light_at_256_is_1_57_tera() -> None:
    light = SD3Family(config(init_from_config="light", t5_max_length=256))
    ours = flops_per_sample(light, Bucket(256, 256))
    assert ours == by_counter(light, 256, 256) and round(ours / 1e12, 2) == 1.57


@pytest.mark.parametrize("depth", [3, 7])
def test_two_attentions_in_a_block(depth: int, tmp_path: Path) -> None:
    """Also where blocks that have them and blocks that have not follow one another in a longer list."""
    sizes = sizes_of("tiny")
    sizes["transformer"] |= {"dual_attention_layers": [0, 1, 3], "num_layers": depth}
    if depth == 3:
        sizes["transformer"]["dual_attention_layers"] = [0, 1]
    dual = of_sizes(sizes, tmp_path)
    assert flops_per_sample(dual, Bucket(128, 128)) == by_counter(dual, 128, T5_LENGTH)
