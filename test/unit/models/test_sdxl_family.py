"""SDXL's maths against diffusers' own pipeline, scheduler and modules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from sdxl import batch_of, config, loaded, pipeline_over, text_of

from difftrain.contracts import Batch, ConfigFault, Parts
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.placeholder import DTYPES
from difftrain.models.text.encode import join_chunks
from difftrain.sampling import Prompt, draw_pictures

CAPTIONS = ["a red star", "two small green circles on a white background"]


@cache
def plain() -> tuple[SDXLFamily, Parts]:
    return loaded(config())


def step(family: SDXLFamily, parts: Parts, batch: Batch) -> torch.Tensor:
    inputs = family.inputs(batch, parts)
    return family.loss_sums(family.forward(parts.root, inputs), inputs)["loss"]


def gradients(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in root.named_parameters() if param.grad is not None}


def test_features_follow_the_architecture() -> None:
    features = plain()[0].features
    assert features.size_multiple == 32
    assert set(features.draws) == {"noise", "timestep", "moments"}
    assert (features.draws["noise"].channels, features.draws["noise"].factor) == (16, 8)
    assert (features.draws["timestep"].kind, features.draws["timestep"].high) == ("integer", 1000)


def test_latents_are_the_posterior_sample_of_diffusers_scaled() -> None:
    family, parts = plain()
    batch, vae = batch_of(family, parts, CAPTIONS), parts.frozen["vae"]
    with torch.no_grad():
        posterior = vae.encode(batch.features["pixels"] / 127.5 - 1).latent_dist
    expected = (posterior.mean + posterior.std * batch.draws["moments"]) * vae.config.scaling_factor
    assert torch.allclose(family.latents(batch, parts), expected, atol=1e-5)
    assert vae.config.scaling_factor != 1  # else the test could not tell


def test_vae_batch_size_changes_nothing() -> None:
    """Nor does a rank's share of a batch: the sums of the fitted encoder's last norm cancel what they round."""
    family, parts = plain()
    batch = batch_of(family, parts, ["a"] * 3)
    cut, _ = loaded(config(vae_batch_size=1))
    assert torch.allclose(cut.latents(batch, parts), family.latents(batch, parts), atol=5e-6)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_noising_and_target_are_those_of_ddpm(kind: str) -> None:
    from diffusers import DDPMScheduler

    family, parts = loaded(config(prediction_type=kind))
    batch = batch_of(family, parts, CAPTIONS)
    schedule = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    found, latents = family.inputs(batch, parts), family.latents(batch, parts)
    noise, t = batch.draws["noise"], batch.draws["timestep"]
    target = noise if kind == "epsilon" else schedule.get_velocity(latents, noise, t)
    assert torch.allclose(found.x_t, schedule.add_noise(latents, noise, t), atol=1e-5)
    assert torch.allclose(found.target, target, atol=1e-5)
    assert found.weight.tolist() == [1, 1] and found.timestep.equal(t)


def test_conditions_and_prediction_are_those_of_diffusers_pipeline() -> None:
    family, parts = plain()
    batch, pipeline = batch_of(family, parts, CAPTIONS), pipeline_over(family, parts)
    sizes = [batch.features[name] for name in ("original_size", "crop_top_left", "target_size")]
    projection = pipeline.text_encoder_2.config.projection_dim
    time_ids = [
        pipeline._get_add_time_ids(*(tuple(s[i].tolist()) for s in sizes), torch.float32, projection) for i in range(2)
    ]
    with torch.no_grad():
        hidden, _, pooled, _ = pipeline.encode_prompt(CAPTIONS, do_classifier_free_guidance=False)
        inputs = family.inputs(batch, parts)
        added = {"text_embeds": pooled, "time_ids": torch.cat(time_ids)}
        expected = pipeline.unet(inputs.x_t, inputs.timestep, hidden, added_cond_kwargs=added).sample
        ours, ours_pooled = text_of(parts.root, inputs.conditions)
        assert torch.allclose(ours, hidden, atol=1e-5) and torch.allclose(ours_pooled, pooled, atol=1e-5)
        assert torch.allclose(family.forward(parts.root, inputs)[0], expected, atol=1e-5)


def test_loss_is_a_weighted_sum_of_sample_means() -> None:
    family, parts = plain()
    inputs = family.inputs(batch_of(family, parts, CAPTIONS), parts)
    inputs.weight = torch.tensor([1.0, 0.25])
    guess = torch.zeros_like(inputs.target, dtype=torch.bfloat16)
    means = inputs.target.square().mean((1, 2, 3))
    found = family.loss_sums((guess,), inputs)["loss"]
    assert found.dtype == torch.float32 and torch.allclose(found, means[0] + 0.25 * means[1])


def test_min_snr_weights_reach_the_loss() -> None:
    family, parts = loaded(config({"loss": {"min_snr_gamma": 5.0}}))
    batch = batch_of(family, parts, CAPTIONS)
    batch.draws["timestep"] = torch.tensor([0, 999])
    weight = family.inputs(batch, parts).weight
    assert weight[0] < 0.01 and weight[1] == 1


def test_only_the_unet_is_trained_unless_asked() -> None:
    family, parts = loaded(config())
    assert {name.split(".")[0] for name, _ in parts.root.named_parameters()} == {"unet"}
    assert set(parts.frozen) == {"vae", "text_encoder_1", "text_encoder_2"}
    assert not any(p.requires_grad for m in parts.frozen.values() for p in m.parameters())
    assert [(g.name, g.lr) for g in family.param_groups(parts.root)] == [("unet", 2e-6)]
    step(family, parts, batch_of(family, parts, CAPTIONS)).backward()
    assert len(gradients(parts.root)) == len(list(parts.root.parameters()))


def rates(te1: float | None, te2: float | None, unet: float = 1e-4) -> dict[str, Any]:
    return {"optimizer": {"learning_rate": unet, "learning_rate_te1": te1, "learning_rate_te2": te2}}


def test_trained_encoders_get_gradients_everywhere_but_where_named() -> None:
    family, parts = loaded(config(rates(1e-5, None), train_text_encoder=True))
    groups = {group.name: group for group in family.param_groups(parts.root)}
    assert {name: group.lr for name, group in groups.items()} == {
        "unet": 1e-4,
        "text_encoder_1": 1e-5,
        "text_encoder_2": 1e-4,  # kohya: the UNet's where none is given
    }
    parts.root.train()
    step(family, parts, batch_of(family, parts, CAPTIONS)).backward()
    trained = {name for group in groups.values() for name, _ in group.named_params}
    assert set(gradients(parts.root)) == trained
    left_out = {name for name, _ in parts.root.named_parameters()} - trained
    assert left_out and all(".layers.1." in name or "final_layer_norm" in name for name in left_out)
    assert all(name.startswith("text_encoder_1") for name in left_out)
    assert any("layer 1 and final_layer_norm" in note for note in parts.notes)


def test_frozen_and_trained_encoders_give_the_same_loss() -> None:
    family, parts = plain()
    both = loaded(config(train_text_encoder=True))
    first_frozen = loaded(config(rates(0.0, 1e-5), train_text_encoder=True))
    batch = batch_of(family, parts, CAPTIONS)
    expected = step(family, parts, batch)
    assert torch.allclose(step(*both, batch), expected, rtol=1e-5)
    assert torch.allclose(step(*first_frozen, batch), expected, rtol=1e-5)
    assert "text_encoder_1" in first_frozen[1].frozen and hasattr(first_frozen[1].root, "text_encoder_2")


def test_a_rate_of_zero_freezes_and_all_zero_is_a_fault() -> None:
    family, parts = loaded(config(rates(1e-5, 0.0, unet=0.0), train_text_encoder=True))
    assert [group.name for group in family.param_groups(parts.root)] == ["text_encoder_1"]
    assert not any(p.requires_grad for p in parts.root.unet.parameters())
    assert any("UNet is frozen" in note for note in parts.notes)
    with pytest.raises(ConfigFault, match="is 0 for every"):
        loaded(config(rates(None, None, unet=0.0)))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    found = []
    for checkpointing in (False, True):
        sections = {"training": {"seed": 1, "gradient_checkpointing": checkpointing}}
        family, parts = loaded(config(sections, train_text_encoder=True))
        parts.root.train()
        assert parts.root.unet.is_gradient_checkpointing == checkpointing
        step(family, parts, batch_of(family, parts, CAPTIONS)).backward()
        found.append(gradients(parts.root))
    plain_gradients, recomputed = found
    assert set(plain_gradients) == set(recomputed)
    for name, value in plain_gradients.items():
        assert torch.allclose(value, recomputed[name], atol=1e-6), name


def test_dtypes_in_mixed_precision() -> None:
    sections = {"training": {"seed": 1, "mixed_precision": "bf16"}}
    family, parts = loaded(config(sections))
    dtypes = {part: next(module.parameters()).dtype for part, module in parts.frozen.items()}
    assert dtypes == {"vae": torch.float32, "text_encoder_1": torch.bfloat16, "text_encoder_2": torch.bfloat16}
    assert {p.dtype for p in parts.root.parameters()} == {torch.float32}
    halved = loaded(config(sections, vae_fp32=False))[1].frozen["vae"]
    assert next(halved.parameters()).dtype == torch.bfloat16
    batch = batch_of(family, parts, CAPTIONS)
    exact = family.latents(batch, parts)
    with torch.autocast("cpu", torch.bfloat16):
        inputs = family.inputs(batch, parts)
        outputs = family.forward(parts.root, inputs)
        assert family.latents(batch, parts).equal(exact)  # the VAE stays out of autocast
    assert {inputs.x_t.dtype, inputs.target.dtype, inputs.weight.dtype} == {torch.float32}
    assert outputs[0].dtype == torch.bfloat16


def test_trained_encoders_under_autocast() -> None:
    sections = {"training": {"seed": 1, "mixed_precision": "bf16", "gradient_checkpointing": True}}
    family, parts = loaded(config(sections, train_text_encoder=True))
    exact_family, exact = loaded(config(train_text_encoder=True))
    parts.root.train()
    batch = batch_of(family, parts, CAPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(family, parts, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(grad.isfinite().all() and grad.dtype == torch.float32 for grad in gradients(parts.root).values())
    assert torch.allclose(loss, step(exact_family, exact, batch), rtol=2e-2)


@pytest.mark.flags("half_vae", "no_half_vae")
def test_a_vae_in_half_precision_stays_near() -> None:
    family, parts = plain()
    half = loaded(config({"training": {"seed": 1, "mixed_precision": "bf16"}}, vae_fp32=False))
    batch = batch_of(family, parts, CAPTIONS)
    exact, found = family.latents(batch, parts), half[0].latents(batch, half[1])
    assert found.dtype == torch.float32 and (found - exact).square().mean().sqrt() < 0.05


@pytest.mark.parametrize("size", [(32, 128), (96, 64), (160, 32)])
def test_buckets_of_multiples_of_32(size: tuple[int, int]) -> None:
    family, parts = plain()
    inputs = family.inputs(batch_of(family, parts, ["a"], *size), parts)
    assert family.forward(parts.root, inputs)[0].shape == (1, 16, size[0] // 8, size[1] // 8) == inputs.x_t.shape


@pytest.mark.flags("max_token_length")
def test_long_captions_in_chunks() -> None:
    """First BOS, the inner 75 of every chunk, the last end; the pooled state of the first chunk (kohya)."""
    family, parts = loaded(config(max_token_length=150))
    long = "star " * 100
    batch = batch_of(family, parts, [long, "a"])
    hidden, pooled = text_of(parts.root, family.text(batch, parts))
    assert hidden.shape == (2, 152, 56)
    short_family, short = plain()
    first, short_pooled = text_of(short.root, short_family.text(batch_of(short_family, short, [long, "a"]), short))
    assert torch.allclose(hidden[:, :76], first[:, :76], atol=1e-5)
    assert torch.allclose(pooled, short_pooled, atol=1e-5)
    assert family.forward(parts.root, family.inputs(batch, parts))[0].isfinite().all()


def test_long_prompts_are_drawn_as_long_captions_are_trained() -> None:
    family, parts = loaded(config(max_token_length=150))
    captions = ["star " * 100, "a"]
    hidden, pooled = text_of(parts.root, family.text(batch_of(family, parts, captions), parts))
    found = text_of(parts.root, family.drawer(parts).conditions(captions, (64, 64)))
    assert torch.allclose(found[0], hidden, atol=1e-6) and torch.allclose(found[1], pooled, atol=1e-6)

    def draw(prompt: str) -> bytes:
        (picture,) = draw_pictures(
            family.drawer(parts), [Prompt(prompt, width=32, height=32, sample_steps=2)], sampler="euler", seed=0
        )
        return picture.image.tobytes()

    assert draw("a " * 100) != draw("a " * 75 + "of " * 25)  # what stands behind token 75 counts


def test_chunks_are_joined_in_order() -> None:
    states = torch.arange(2 * 3 * 77).reshape(6, 77, 1)
    joined = join_chunks(states, 3)[..., 0]
    assert joined.shape == (2, 227)
    expected = [0, *range(1, 76), *range(78, 153), *range(155, 230), 230]
    assert joined[0].tolist() == expected and joined[1].tolist() == [x + 231 for x in expected]


def test_inputs_take_what_encoders_made() -> None:
    family, parts = plain()
    batch, encoders = batch_of(family, parts, CAPTIONS), family.encoders(parts)
    kept = {name: value for each in encoders.values() for name, value in each.encode(batch).items()}
    sizes = {name: value for name, value in batch.features.items() if "size" in name or "crop" in name}
    online, cached = family.inputs(batch, parts), family.inputs(replace(batch, features=kept | sizes), parts)
    assert cached.x_t.equal(online.x_t)
    assert set(cached.conditions) == {"time_ids", "hidden_1", "hidden_2", "pooled"}
    assert all(value.equal(cached.conditions[name]) for name, value in online.conditions.items())


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_encoders_say_of_which_shape_and_dtype_their_features_are(precision: str) -> None:
    family, parts = loaded(config({"training": {"seed": 1, "mixed_precision": precision}}, max_token_length=150))
    batch = batch_of(family, parts, CAPTIONS, height=64, width=96)
    with torch.no_grad(), torch.autocast("cpu", DTYPES[precision], enabled=precision != "no"):
        for each in family.encoders(parts).values():
            made = each.encode(batch)
            assert made.keys() == each.features.keys()
            for name, feature in each.features.items():
                assert made[name].shape[1:] == feature.shape(batch.bucket)
                assert made[name].dtype == getattr(torch, feature.dtype)


def test_a_trained_encoder_is_none_that_can_be_cached() -> None:
    sections = {"training": {"seed": 1}, "optimizer": {"learning_rate_te1": 0.0}}
    family, parts = loaded(config(sections, train_text_encoder=True))
    assert set(family.encoders(parts)) == {"latents", "text_encoder_1"}
    assert set(family.encoders(parts)["text_encoder_1"].features) == {"hidden_1"}


def test_the_same_seed_gives_the_same_weights_and_another_others() -> None:
    first, again = plain()[1].root.state_dict(), loaded(config())[1].root.state_dict()
    other = loaded(config({"training": {"seed": 2}}))[1].root.state_dict()
    assert all(value.equal(again[name]) for name, value in first.items())
    assert not first["unet.conv_in.weight"].equal(other["unet.conv_in.weight"])


def test_the_meta_device_has_the_same_names_and_shapes() -> None:
    _, parts = plain()
    meta = SDXLFamily(config()).load(meta=True)
    assert all(p.is_meta for p in meta.root.parameters())
    shapes = {name: value.shape for name, value in parts.root.state_dict().items()}
    assert {name: value.shape for name, value in meta.root.state_dict().items()} == shapes
    assert meta.config == parts.config


def test_units_are_blocks_in_running_order() -> None:
    family, parts = loaded(config(train_text_encoder=True))
    names = [name for name, _ in family.units(parts)]
    assert (
        names[:2] == ["text_encoder_1.encoder.layers.0", "text_encoder_1.encoder.layers.1"] or "text_model" in names[0]
    )
    assert names[-7:] == [f"unet.down_blocks.{i}" for i in range(3)] + ["unet.mid_block"] + [
        f"unet.up_blocks.{i}" for i in range(3)
    ]
    assert all(parts.root.get_submodule(name) is module for name, module in family.units(parts))
