"""Floating-point operations: equal to torch's counter, and the published figure of SD3-Light at 256 px."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sd3 import T5_LENGTH, batch_of, config, loaded
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from difftrain.contracts import Bucket
from difftrain.models.parts.clip_vocabulary import LENGTH
from difftrain.models.sd3.architecture import Architecture, named
from difftrain.models.sd3.flops import flops_per_sample


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


def by_counter(architecture: Architecture, side: int, t5_length: int) -> int:
    """Count a pass over empty tensors."""
    model: Any = architecture.build("transformer")
    config = architecture.transformer
    meta = torch.device("meta")
    arguments = (
        torch.empty(1, config["in_channels"], side // 8, side // 8, device=meta),
        torch.empty(1, LENGTH + t5_length, config["joint_attention_dim"], device=meta),
        torch.empty(1, config["pooled_projection_dim"], device=meta),
        torch.zeros(1, device=meta),
    )
    return counted(lambda: model(*arguments, return_dict=False)[0].sum().backward())


def test_light_at_256_is_1_57_tera() -> None:
    light = named("light")
    ours = flops_per_sample(light, Bucket(256, 256), 256)
    assert ours == by_counter(light, 256, 256) and round(ours / 1e12, 2) == 1.57


def test_two_attentions_in_a_block() -> None:
    tiny = named("tiny")
    dual = replace(tiny, transformer=tiny.transformer | {"dual_attention_layers": (0, 1)})
    assert flops_per_sample(dual, Bucket(128, 128), T5_LENGTH) == by_counter(dual, 128, T5_LENGTH)
