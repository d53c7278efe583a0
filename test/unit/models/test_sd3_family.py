"""SD3's maths against diffusers' own pipeline and modules: inputs, conditions, dropped texts, terms of the loss."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from sd3 import T5_LENGTH, batch_of, config, loaded, pipeline_over, sizes_of
from torch import Tensor

from difftrain.contracts import Batch, Bucket, ConfigFault, Draw, Parts
from difftrain.data.samples import host_draws
from difftrain.models.families.sd3.family import SD3Family

CAPTIONS = ["a red star", "two small green circles on a white background"]
DROPS = {"enable_uncond_text_dropout": True}


@cache
def plain() -> tuple[SD3Family, Parts]:
    return loaded(config())


def step(family: SD3Family, parts: Parts, batch: Batch) -> dict[str, Tensor]:
    inputs = family.inputs(batch, parts)
    return family.loss_sums(family.forward(parts.root, inputs), inputs)


def prompts(family: SD3Family, parts: Parts, **options: Any) -> tuple[Tensor, Tensor]:
    """Encode as diffusers does, with its tokenizers in place of the texts' ids."""
    told = pipeline_over(family, parts).encode_prompt(
        CAPTIONS, None, None, do_classifier_free_guidance=False, max_sequence_length=T5_LENGTH, **options
    )
    return told[0], told[2]


def test_features_follow_the_architecture() -> None:
    features = plain()[0].features
    assert features.size_multiple == 16 and set(features.draws) == {"noise", "timestep", "moments"}
    assert (features.draws["noise"].channels, features.draws["noise"].factor) == (16, 8)
    assert features.draws["timestep"].kind == "uniform" and features.draws["timestep"].through is not None
    dropping = SD3Family(config(**DROPS)).features.draws
    assert {name for name, each in dropping.items() if each.trains} == {"uncond_1", "uncond_2", "uncond_3"}
    drawn_once = SD3Family(config({"cache": {"latents_as": "mean"}})).features.draws
    assert "moments" not in drawn_once


def test_latents_are_the_posterior_sample_of_diffusers_shifted_and_scaled() -> None:
    family, parts = plain()
    batch, vae = batch_of(family, parts, CAPTIONS), parts.frozen["vae"]
    with torch.no_grad():
        posterior = vae.encode(batch.features["pixels"] / 127.5 - 1).latent_dist
    sample = posterior.mean + posterior.std * batch.draws["moments"]
    expected = (sample - vae.config.shift_factor) * vae.config.scaling_factor
    assert torch.allclose(family.latents(batch, parts), expected, atol=1e-5)
    assert vae.config.shift_factor and vae.config.scaling_factor != 1  # else the test could not tell


def test_inputs_lie_on_the_straight_path_and_are_fp32() -> None:
    family, parts = loaded(config({"flow": {"shift": 3.0}}))
    batch = batch_of(family, parts, CAPTIONS)
    found, x0 = family.inputs(batch, parts), family.latents(batch, parts)
    t = batch.draws["timestep"].view(-1, 1, 1, 1)
    torch.testing.assert_close(found.x_t, (1 - t) * x0 + t * batch.draws["noise"])
    torch.testing.assert_close(found.target, batch.draws["noise"] - x0)
    assert found.timestep.equal(1000 * batch.draws["timestep"]) and found.weight.tolist() == [1, 1]
    every = (found.x_t, found.timestep, found.target, found.weight, *found.conditions.values())
    assert {each.dtype for each in every} == {torch.float32} and not any(each.requires_grad for each in every)
    plainly = SD3Family(config())
    assert (batch_of(plainly, parts, CAPTIONS).draws["timestep"] < batch.draws["timestep"]).all()


def test_conditions_are_those_of_diffusers_pipeline() -> None:
    family, parts = plain()
    found = family.text(batch_of(family, parts, CAPTIONS), parts)
    tokens, pooled = prompts(family, parts)
    torch.testing.assert_close(found["tokens"], tokens, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["pooled"], pooled, rtol=1e-4, atol=1e-5)
    assert found["tokens"].shape == (2, 77 + T5_LENGTH, 64) and found["pooled"].shape == (2, 48)
    assert not found["tokens"][:, :77, 56:].any()  # filled up


def test_sequences_are_as_long_as_the_clip_encoders_have_positions(tmp_path: Path) -> None:
    sizes = sizes_of("tiny")
    for encoder in ("text_encoder", "text_encoder_2"):
        sizes[encoder]["max_position_embeddings"] = 6
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    family, parts = loaded(config(init_from_config=str(tmp_path / "sizes.json")))
    batch = batch_of(family, parts, CAPTIONS)
    assert batch.features["input_ids_1"].shape == (2, 6)  # the second caption is cut
    found = family.text(batch, parts)
    for ours, theirs in zip((found["tokens"], found["pooled"]), prompts(family, parts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found["tokens"].shape == (2, 6 + T5_LENGTH, 64)


def test_a_mask_of_t5_leaves_zeros_and_hides_the_padding() -> None:
    family, parts = loaded(config(t5_attention_mask=True))
    batch = batch_of(family, parts, CAPTIONS)
    found, mask = family.text(batch, parts)["tokens"][:, 77:], batch.features["t5_mask"]
    assert not found[~mask].any() and found[mask].abs().sum(-1).all() and not mask.all()
    longer = SD3Family(config(t5_attention_mask=True, t5_max_length=2 * T5_LENGTH))
    again = longer.text(batch_of(longer, parts, CAPTIONS), parts)["tokens"][:, 77:]
    torch.testing.assert_close(again[:, :T5_LENGTH], found, rtol=1e-4, atol=1e-5)
    unmasked = plain()[0].text(batch_of(plain()[0], parts, CAPTIONS), parts)["tokens"][:, 77:]
    assert unmasked[~mask].abs().sum(-1).all()


@pytest.mark.parametrize("dropped", [(), (1,), (2, 3), (1, 2, 3)])
def test_a_dropped_encoder_is_zeros_in_tokens_and_pooled_alike(dropped: tuple[int, ...]) -> None:
    family, parts = loaded(config(**DROPS))
    batch = batch_of(family, parts, CAPTIONS, trains=False)
    whole = family.text(batch, parts)  # evaluation: without the draws nothing is dropped
    draws = {f"uncond_{i}": torch.tensor([0.463 if i in dropped else 0.4641, 0.9]) for i in (1, 2, 3)}
    found = family.text(replace(batch, draws={**batch.draws, **draws}), parts)
    assert all(found[name][1].equal(whole[name][1]) for name in found)
    places = {1: (slice(0, 77), slice(0, 24)), 2: (slice(0, 77), slice(24, 56)), 3: (slice(77, None), slice(None))}
    vectors = {1: slice(0, 24), 2: slice(24, 48)}
    for number, (rows, columns) in places.items():
        expected = whole["tokens"][0, rows, columns] * (number not in dropped)
        assert found["tokens"][0, rows, columns].equal(expected)
    for number, columns in vectors.items():
        assert found["pooled"][0, columns].equal(whole["pooled"][0, columns] * (number not in dropped))


def test_a_tenth_of_the_samples_is_unconditional_altogether() -> None:
    """0.464^3 = 9.99 %: one draw an encoder. Five draws would give 2.15 %."""
    family = SD3Family(config(**DROPS))
    uses = [Draw(i, i.to_bytes(16, "little"), k) for i in range(4000) for k in range(5)]
    drawn = [
        host_draws(f"uncond_{i}", family.features.draws[f"uncond_{i}"], Bucket(64, 64), uses, 3) < 0.464
        for i in (1, 2, 3)
    ]
    for each in drawn:
        assert binomtest(int(each.sum()), len(uses), 0.464).pvalue > 1e-3
    every = drawn[0] & drawn[1] & drawn[2]
    assert binomtest(int(every.sum()), len(uses), 0.464**3).pvalue > 1e-3
    for i, j in ((0, 1), (0, 2), (1, 2)):  # independent of one another
        assert binomtest(int((drawn[i] & drawn[j]).sum()), len(uses), 0.464**2).pvalue > 1e-3


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_reconstruction_is_a_term_of_its_own_and_measured(layer: int) -> None:
    section = {"text_recon_gamma": 0.25, "text_recon_target_layer": layer}
    family, parts = loaded(config({"loss": section}))
    batch = batch_of(family, parts, CAPTIONS)
    inputs = family.inputs(batch, parts)
    outputs = family.forward(parts.root, inputs)
    velocity, last, target = outputs
    assert velocity.shape == inputs.x_t.shape and last.shape == target.shape == (2, 77 + T5_LENGTH, 64)
    assert last.requires_grad and not target.requires_grad and not torch.equal(last, target)
    sums = family.loss_sums(outputs, inputs)
    recon = sum(((last[i] - target[i]) ** 2).mean() for i in range(2))
    torch.testing.assert_close(sums["metric/text_recon_loss"], recon)
    torch.testing.assert_close(sums["text_recon"], 0.25 * recon)
    torch.testing.assert_close(sums["denoise"], ((velocity - inputs.target) ** 2).flatten(1).mean(1).sum())
    sums["text_recon"].backward()
    blocks = parts.root.transformer.transformer_blocks
    assert blocks[0].attn.to_q.weight.grad.abs().sum() > 0  # the whole way back
    without, lighter = loaded(config())
    assert set(step(without, lighter, batch)) == {"loss", "metric/denoise_loss"}
    assert lighter.root.transformer.transformer_blocks[-1].context_pre_only and not blocks[-1].context_pre_only


@pytest.mark.parametrize("layer", [3, 4])
def test_a_target_beyond_the_depth_is_a_fault(layer: int) -> None:
    section = {"text_recon_gamma": 0.25, "text_recon_target_layer": layer}
    with pytest.raises(ConfigFault, match=rf"\[loss\] text_recon_target_layer: is {layer}, .* 3 blocks"):
        SD3Family(config({"loss": section})).load(meta=True)


def test_every_fault_of_the_settings_is_named_at_once() -> None:
    sections = {
        "loss": {"text_recon_gamma": 0.25, "text_recon_target_layer": 9},
        "optimizer": {"learning_rate": 0.0},
        "data": {"resolution": (1024, 512)},
    }
    with pytest.raises(ConfigFault) as caught:
        SD3Family(config(sections)).load(meta=True)
    told = " ".join(map(str, caught.value.faults))
    assert len(caught.value.faults) == 3
    for part in ("[loss] text_recon_target_layer", "--learning_rate", "--resolution: ", "1024 px", "512"):
        assert part in told


def test_masks_weights_and_charbonnier() -> None:
    family, parts = loaded(config({"loss": {"type": "pseudo_huber", "pseudo_huber_c": 0.3}}))
    batch = batch_of(family, parts, CAPTIONS)
    mask = torch.zeros(2, 1, 64, 64)
    mask[:, :, 16:48, 8:40] = 1
    weighed = {**batch.features, "loss_weight": torch.tensor([1.0, 0.25])}
    batch = replace(batch, loss_mask=mask, features=weighed)
    inputs = family.inputs(batch, parts)
    assert inputs.mask is not None and inputs.mask.sum() == 2 * 16
    (velocity,) = family.forward(parts.root, inputs)
    error = ((velocity - inputs.target) ** 2 + 0.09).sqrt() - 0.3
    each = (error.mean(1, keepdim=True) * inputs.mask).flatten(1).sum(1)
    sums = family.loss_sums((velocity,), inputs)
    torch.testing.assert_close(sums["loss"], (each / 16 * torch.tensor([1.0, 0.25])).sum())
    over_all = SD3Family(config({"loss": {"type": "pseudo_huber", "pseudo_huber_c": 0.3, "mask_mean": "all"}}))
    found = over_all.loss_sums((velocity,), inputs)["loss"]
    torch.testing.assert_close(found, (each / 64 * torch.tensor([1.0, 0.25])).sum())


def test_splits_of_a_batch_add_up() -> None:
    family, parts = loaded(config({"loss": {"text_recon_gamma": 0.1}}))
    whole = batch_of(family, parts, [*CAPTIONS, "a third"])
    cut = [
        replace(
            whole,
            features={name: each[rows] for name, each in whole.features.items()},
            draws={name: each[rows] for name, each in whole.draws.items()},
        )
        for rows in (slice(0, 1), slice(1, 3))
    ]
    with torch.no_grad():
        together, apart = step(family, parts, whole), [step(family, parts, each) for each in cut]
    for name, value in together.items():
        torch.testing.assert_close(sum(each[name] for each in apart), value, rtol=1e-5, atol=0)


def test_units_groups_and_what_is_trained() -> None:
    family, parts = plain()
    names = [name for name, _ in family.units(parts)]
    assert names == [f"transformer.transformer_blocks.{i}" for i in range(3)]
    assert [parts.root.get_submodule(name) for name in names] == family.repeated(parts)
    (group,) = family.param_groups(parts.root)
    assert group.name == "transformer" and len(group.named_params) == len(list(parts.root.parameters()))
    assert not any(each.requires_grad for part in parts.frozen.values() for each in part.parameters())
    assert not any(module.training for part in parts.frozen.values() for module in part.modules())


def test_every_trained_parameter_gets_a_gradient() -> None:
    for sections in (
        {},
        {"loss": {"text_recon_gamma": 0.1}},
        {"training": {"seed": 1, "gradient_checkpointing": True}},
    ):
        family, parts = loaded(config(sections))
        sums = step(family, parts, batch_of(family, parts, CAPTIONS))
        sum(value for name, value in sums.items() if not name.startswith("metric/")).backward()
        assert all(each.grad is not None for each in parts.root.parameters())


def test_in_fp16_what_overflows_of_t5_stays_wide() -> None:
    family, parts = loaded(config({"training": {"seed": 1, "mixed_precision": "fp16"}}))
    encoder = parts.frozen["text_encoder_3"]
    kept = {name for name, each in encoder.named_parameters() if each.dtype == torch.float32}
    assert kept and all(".wo." in name for name in kept)
    batch = batch_of(family, parts, CAPTIONS)
    with torch.autocast("cpu", torch.float16):
        half = family.encoders(parts)["text_encoder_3"].encode(batch)["hidden_3"]
    assert half.dtype == torch.float16
    wide = plain()[0].encoders(plain()[1])["text_encoder_3"].encode(batch)["hidden_3"]
    torch.testing.assert_close(half.float(), wide, rtol=0.02, atol=0.02)


@pytest.mark.nightly
def test_the_published_sizes() -> None:
    families = (SD3Family(config({"loss": {"text_recon_gamma": g}}, init_from_config="light")) for g in (0, 0.1))
    bare, whole = (sum(e.numel() for e in each.source.build("transformer").parameters()) for each in families)
    assert (bare, whole) == (1_263_501_376, 1_294_187_584)
    root = Path(__file__).resolve().parents[3]
    page = " ".join((root / "docs" / "sd3_light.md").read_text("utf-8").split())
    assert re.search(rf"\b{bare / 1e9:.3f} billion [^.]*\b{whole / 1e9:.3f} with ", page)
    recipe = root / "configs" / "sd3_light" / "base.toml"  # without text reconstruction
    assert f"{bare / 1e9:.3f} B trained parameters" in recipe.read_text("utf-8").splitlines()[1]
    more = " ".join((root / "docs" / "sd3_export.md").read_text("utf-8").split())
    assert f"{bare / 1e9:.2f} billion parameters" in more and f"{whole / 1e9:.2f} billion parameters" in more
