"""Chroma's mask where activations are recomputed: diffusers' own checkpointing drops it in single blocks, the pass does not."""

from __future__ import annotations

from typing import Any

import torch
from families import Tiny, config, diffusers_forward, loaded, own_pass


def gradients(tiny: Tiny, predict: Any, recomputed: bool) -> list[torch.Tensor]:
    """Return the gradients of the joint blocks' weights."""
    inputs, net = tiny.inputs(), tiny.net
    assert not inputs.conditions["mask"].all(), "a mask that drops nothing shows nothing"
    net.train()
    (net.enable_gradient_checkpointing if recomputed else net.disable_gradient_checkpointing)()
    sums = tiny.family.loss_sums((predict(tiny, inputs),), inputs)
    return list(torch.autograd.grad(sums["loss"], list(net.transformer_blocks.parameters())))


def test_diffusers_checkpointing_drops_the_mask_of_single_blocks_and_the_pass_keeps_it() -> None:
    tiny = loaded(config("chroma"))
    right = gradients(tiny, diffusers_forward, False)
    ours, theirs = gradients(tiny, own_pass, True), gradients(tiny, diffusers_forward, True)
    assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))
    largest = max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in zip(theirs, right, strict=True)
    )
    assert largest > 1e-3, "diffusers hands on the mask now: say so in docs/models/chroma.md"
