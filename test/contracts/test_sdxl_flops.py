"""Floating-point operations: equal to torch's counter, and the published figure of SDXL at 1024 px."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sdxl import batch_of, config, loaded, source
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from difftrain.contracts import Bucket
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.flops import unet_step_flops

UNET = frozenset(["unet"])


def counted(run: Callable[[], object]) -> int:
    """Count with attention taken apart into its products: the counter does not know the fused kernel of the CPU."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("size", [(64, 64), (32, 96), (160, 64)])
def test_unet_on_tiny(size: tuple[int, int]) -> None:
    family, parts = loaded(config())
    batch, bucket = batch_of(family, parts, ["a"], *size), Bucket(*size)
    inputs = family.inputs(batch, parts)
    found = counted(lambda: family.forward(parts.root, inputs)[0].sum().backward())
    assert found == family.flops_per_sample(parts, bucket)


@pytest.mark.parametrize("rates", [(None, None), (0.0, 1e-4), (1e-4, 0.0)])
def test_trained_encoders_and_chunks_on_tiny(rates: tuple[float | None, float | None]) -> None:
    sections = {"optimizer": dict(zip(("learning_rate_te1", "learning_rate_te2"), rates))}
    family, parts = loaded(config(sections, train_text_encoder=True, max_token_length=150))
    inputs = family.inputs(batch_of(family, parts, ["a"]), parts)
    found = counted(lambda: family.forward(parts.root, inputs)[0].sum().backward())
    assert found == family.flops_per_sample(parts, Bucket(64, 64))


def test_base_at_1024_is_20_2_tera() -> None:
    base = source("base")
    unet = base.build("unet")
    arguments = (
        torch.empty(1, 4, 128, 128, device="meta"),
        torch.zeros(1, device="meta"),
        torch.empty(1, 77, 2048, device="meta"),
    )
    added = {"text_embeds": torch.empty(1, 1280, device="meta"), "time_ids": torch.empty(1, 6, device="meta")}
    found = counted(lambda: unet(*arguments, added_cond_kwargs=added).sample.sum().backward())
    ours = unet_step_flops(base.sizes, SDXLFamily.texts, (128, 128), num_chunks=1, trained=UNET)
    assert found == ours and round(ours / 1e12, 1) == 20.2
