"""A step of training: every trained parameter takes part, half precision is near, cached features change nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, Tiny, batch_of, bucket_of

from difftrain.contracts import EVERY, Batch

# what is computed and thrown away: its gradient is there, and exactly zero
SILENT = {  # what text asks in the last block
    "hunyuan_video_15": r"\.1\.attn\.(add_q_proj|norm_added_q)\.",
    "hunyuan_video_15_i2v": r"\.1\.attn\.(add_q_proj|norm_added_q)\.",
    "qwen_image": r"\.1\.attn\.(add_q_proj|norm_added_q)\.",
    "qwen_image_edit": r"\.1\.attn\.(add_q_proj|norm_added_q)\.",
    "qwen_image_edit_plus": r"\.1\.attn\.(add_q_proj|norm_added_q)\.",
    "sd3": r"\.2\.attn\.add_q_proj\.",
}


def test_a_step_moves_every_trained_weight(fresh: Any) -> None:
    tiny = fresh()
    trained = {name: each for name, each in tiny.parts.root.named_parameters() if each.requires_grad}
    before = {name: each.detach().clone() for name, each in trained.items()}
    groups = tiny.family.param_groups(tiny.parts.root)
    assert sorted(name for group in groups for name, _ in group.named_params) == sorted(trained)
    optimizer = torch.optim.AdamW([{"params": [each for _, each in g.named_params], "lr": g.lr} for g in groups])
    loss = tiny.loss()
    assert torch.isfinite(loss)
    loss.backward()
    assert [name for name, each in trained.items() if each.grad is None] == [], "name in `unread` what no loss reaches"
    silent = re.compile(SILENT.get(tiny.family.name, "nothing"))
    assert [name for name, each in trained.items() if not each.grad.any() and not silent.search(name)] == []
    assert all(torch.isfinite(each.grad).all() for each in trained.values())
    optimizer.step()
    stayed = [name for name, each in trained.items() if torch.equal(each, before[name])]
    assert [name for name in stayed if not silent.search(name)] == []
    assert float(tiny.loss().detach()) != float(loss.detach())


def test_what_no_loss_reaches_is_frozen_by_name(tiny: Tiny) -> None:
    tiny.net.requires_grad_(True)
    try:
        inputs = tiny.inputs()
        names, values = zip(*tiny.net.named_parameters(), strict=True)
        grads = torch.autograd.grad(tiny.loss(inputs), values, allow_unused=True)
        unread = {name for name, grad in zip(names, grads, strict=True) if grad is None}
    finally:
        tiny.family.freeze(tiny.parts, tiny.parts.root)
    assert unread == {name for name, each in tiny.net.named_parameters() if not each.requires_grad}


def test_bf16_is_near_fp32(tiny: Tiny) -> None:
    inputs = tiny.inputs()
    with torch.no_grad():
        exact = tiny.loss(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            near = tiny.loss(inputs)
    assert near.dtype == torch.float32
    assert abs(float(near - exact)) <= 2e-2 * abs(float(exact))


def test_inputs_are_fp32(tiny: Tiny) -> None:
    inputs, features = tiny.inputs(), tiny.family.features
    assert inputs.x_t.shape[1:] == features.draws["noise"].shape(tiny.batch.bucket) == inputs.target.shape[1:]
    assert inputs.timestep.shape == (2,) and (inputs.timestep >= 0).all() and (inputs.timestep < 1000).all()
    wide = [inputs.x_t, inputs.target, inputs.weight, *inputs.conditions.values()]
    assert all(each.dtype == torch.float32 for each in wide if each.is_floating_point())


def test_inputs_lie_on_the_flow(tiny: Tiny) -> None:
    if tiny.family.row.objective != "flow":
        pytest.skip("it learns no flow")
    inputs = tiny.inputs()
    t = (inputs.timestep / 1000).view(-1, *(1,) * (inputs.x_t.ndim - 1))
    x0 = inputs.x_t - t * inputs.target
    torch.testing.assert_close(x0, tiny.family.latents(tiny.batch, tiny.parts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_inputs_are_those_of_diffusers_ddpm(name: str, fresh: Any, kind: str) -> None:
    if FAMILIES[name].objective != "ddpm":
        pytest.skip("it learns no noise over discrete steps")
    from diffusers import DDPMScheduler

    tiny = fresh(prediction_type=kind)
    inputs, noise = tiny.inputs(), tiny.batch.draws["noise"]
    latents, t = tiny.family.latents(tiny.batch, tiny.parts), tiny.batch.draws["timestep"]
    scheduler = DDPMScheduler.from_config(tiny.family.scheduler().config)
    assert scheduler.config.prediction_type == kind and torch.equal(inputs.timestep, t)
    assert scheduler.config.num_train_timesteps == tiny.family.features.draws["timestep"].high
    torch.testing.assert_close(inputs.x_t, scheduler.add_noise(latents, noise, t), rtol=1e-4, atol=1e-5)
    target = noise if kind == "epsilon" else scheduler.get_velocity(latents, noise, t)
    torch.testing.assert_close(inputs.target, target, rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs.weight, torch.ones(2))


def cached(tiny: Tiny) -> Batch:
    """Encode a batch as the cache builder does, and keep nothing but what comes out, the masks of it, and sizes."""
    sizes = tiny.family.size_features((tiny.batch.bucket.height, tiny.batch.bucket.width), 1)
    features = {name: tiny.batch.features[name] for name in sizes}
    for encoder in tiny.family.encoders(tiny.parts).values():
        made = encoder.encode(tiny.batch)
        for name, feature in encoder.features.items():
            assert made[name].shape[1:] == feature.shape(tiny.batch.bucket), name
            assert str(made[name].dtype) == f"torch.{feature.dtype}", name
        for name, mask in encoder.masks.items():
            assert made[mask].shape == made[name].shape[:2], "a mask is of what comes out"
            behind = made[name][~made[mask].bool()]
            assert not behind.any(), "rows behind the mask are zeros: a cache does not keep them"
        features |= made
    return replace(tiny.batch, features=features)


def test_cached_features_give_the_same_bits(tiny: Tiny) -> None:
    from_cache = replace(tiny, batch=cached(tiny))
    assert float(from_cache.loss().detach()) == float(tiny.loss().detach())
    with torch.no_grad():
        prediction, again = (each.family.forward(each.parts.root, each.inputs())[0] for each in (tiny, from_cache))
    assert torch.equal(prediction, again)


def test_fingerprints_need_no_modules(name: str, fresh: Any, tiny: Tiny) -> None:
    asleep = tiny.family.load(deferred=EVERY)
    told = {each: encoder.fingerprint() for each, encoder in tiny.family.encoders(asleep).items()}
    assert told == {each: encoder.fingerprint() for each, encoder in tiny.family.encoders(tiny.parts).items()}
    other = fresh({"training": {"seed": 2}})
    theirs = {each: encoder.fingerprint() for each, encoder in other.family.encoders(other.parts).items()}
    drawn = {each for each in told if told[each] != theirs[each]}
    # the VAE of the tiny sizes is shipped, for those that it fits
    assert drawn >= {each for each in told if not each.endswith("latents")}


def test_parts_that_wait_count_as_many_weights(tiny: Tiny) -> None:
    asleep = tiny.family.load(deferred=EVERY)
    for part, module in tiny.parts.frozen.items():
        count = sum(each.numel() for each in module.parameters())
        assert sum(each.numel() for each in asleep.frozen[part].parameters()) == count, part
        asleep.load(part)
        ours, theirs = asleep.frozen[part].state_dict(), module.state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), part
    assert asleep.load_root is not None
    asleep.fill_root()
    ours = asleep.root.state_dict()
    fresh_weights = tiny.family.load().root.state_dict()
    assert all(torch.equal(value, fresh_weights[name]) for name, value in ours.items())


def test_train_only_trains_that_alone(name: str, fresh: Any) -> None:
    if "model.train_only" not in FAMILIES[name].takes:
        pytest.skip("the family trains all of its denoiser")
    place = fresh().family.units(fresh().parts)[0][0].partition(".")[2]
    tiny = fresh(train_only=(rf"^{place}\.",))
    names = {each for each, value in tiny.parts.root.named_parameters() if value.requires_grad}
    assert names and all(each.startswith(f"{tiny.family.denoiser}.{place}.") for each in names)
    assert tiny.parts.base == {each for each, _ in tiny.parts.root.named_parameters()} - names
    tiny.loss().backward()
    assert all((value.grad is not None) == (each in names) for each, value in tiny.parts.root.named_parameters())


def test_another_shape_works_as_well(name: str, tiny: Tiny) -> None:
    bucket = bucket_of(name)
    upright = bucket._replace(height=bucket.width, width=bucket.height, frames=1)
    other = replace(tiny, batch=batch_of(tiny.family, upright, ("",), seed=3))
    assert torch.isfinite(other.loss().detach())
