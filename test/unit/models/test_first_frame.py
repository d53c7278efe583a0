"""Clips whose first frame is given: it is almost without noise, at a time of its own, and nothing is learnt of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import Tiny, batch_of, bucket_of, config, loaded

from difftrain.contracts import Bucket
from difftrain.models.objective.flow import FIRST_FRAME

NAME, GIVEN = "ltx_video", 0.01  # of 0..1000


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return loaded(config(NAME, first_frame_conditioning_p=0.5))


def told(tiny: Tiny, *draws: float) -> Any:
    """Return inputs of two clips whose draws are these."""
    batch = replace(tiny.batch, draws=tiny.batch.draws | {FIRST_FRAME: torch.tensor(draws)})
    return tiny.family.inputs(batch, tiny.parts)


def without(tiny: Tiny) -> Any:
    """Return inputs of the same clips where no frame is given, as in evaluation."""
    draws = {name: value for name, value in tiny.batch.draws.items() if name != FIRST_FRAME}
    return tiny.family.inputs(replace(tiny.batch, draws=draws), tiny.parts)


def test_a_given_frame_has_its_own_time_and_the_others_the_clips(tiny: Tiny) -> None:
    plain, inputs = without(tiny), told(tiny, 0.4, 0.6)
    assert plain.timestep.ndim == 1 and plain.mask is None and inputs.timestep.shape == (2, 2)
    assert torch.equal(inputs.timestep[:, 1], plain.timestep) and inputs.timestep[1, 0] == plain.timestep[1]
    assert float(inputs.timestep[0, 0]) == pytest.approx(GIVEN)
    assert torch.equal(inputs.x_t[:, :, 1:], plain.x_t[:, :, 1:]) and torch.equal(inputs.x_t[1], plain.x_t[1])
    clean = tiny.family.latents(tiny.batch, tiny.parts)
    torch.testing.assert_close(inputs.x_t[0, :, 0], clean[0, :, 0], atol=2e-4, rtol=0)
    assert torch.equal(inputs.target, plain.target)


def test_the_loss_is_that_of_the_frames_that_are_not_given(tiny: Tiny) -> None:
    inputs = told(tiny, 0.4, 0.6)
    prediction = torch.randn(inputs.x_t.shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = tiny.family.loss_sums((prediction,), inputs)["loss"]
    error = (prediction - inputs.target).square()
    torch.testing.assert_close(loss, error[0, :, 1:].mean() + error[1].mean())
    (grad,) = torch.autograd.grad(loss, prediction)
    assert not grad[0, :, 0].any() and grad[0, :, 1].all() and grad[1].all()


def test_a_mask_of_the_data_counts_in_every_frame_that_is_learnt(tiny: Tiny) -> None:
    mask = torch.zeros(2, 1, tiny.batch.bucket.height, tiny.batch.bucket.width)
    mask[..., :32] = 1
    tiny = replace(tiny, batch=replace(tiny.batch, loss_mask=mask))
    inputs = told(tiny, 0.4, 0.6)
    prediction = torch.randn(inputs.x_t.shape, generator=torch.Generator().manual_seed(1))
    error = (prediction - inputs.target).square()[..., :1]
    loss = tiny.family.loss_sums((prediction,), inputs)["loss"]
    torch.testing.assert_close(loss, error[0, :, 1:].mean() + error[1].mean())


def test_pictures_have_no_frame_that_could_be_given(tiny: Tiny) -> None:
    bucket = bucket_of(NAME)
    batch = batch_of(tiny.family, Bucket(bucket.height, bucket.width))
    inputs = tiny.family.inputs(batch, tiny.parts)
    assert inputs.timestep.ndim == 1 and inputs.mask is None and FIRST_FRAME in batch.draws


def test_a_step_learns_of_clips_with_a_given_frame(tiny: Tiny) -> None:
    loss = tiny.loss(told(tiny, 0.4, 0.6))
    grads = torch.autograd.grad(loss, [each for each in tiny.parts.root.parameters() if each.requires_grad])
    assert all(torch.isfinite(grad).all() and grad.any() for grad in grads)


def test_only_models_that_learn_it_take_it() -> None:
    assert FIRST_FRAME not in loaded(config(NAME)).family.features.draws


def test_of_a_frame_that_is_always_given_nothing_is_learnt_either() -> None:
    """Of a network that reads its latents: neither its noise nor what is said of it matters."""
    tiny = loaded(config("cosmos_predict2_video"))
    inputs = tiny.inputs()
    loss = tiny.loss(inputs)
    noisier = inputs.x_t.clone()
    noisier[:, :, 0] += 1
    torch.testing.assert_close(tiny.loss(replace(inputs, x_t=noisier)), loss)
    prediction = torch.randn(inputs.x_t.shape, generator=torch.Generator().manual_seed(1))
    error = (prediction - inputs.target).square()[:, :, 1:]
    sums = tiny.family.loss_sums((prediction,), inputs)
    torch.testing.assert_close(sums["loss"], error.flatten(1).mean(1).sum())
    bucket = bucket_of("cosmos_predict2_video")
    picture = tiny.family.inputs(batch_of(tiny.family, Bucket(bucket.height, bucket.width)), tiny.parts)
    assert picture.mask is None and float(tiny.loss(picture).detach()) > 0.1
