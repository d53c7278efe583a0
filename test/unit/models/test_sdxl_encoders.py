"""SDXL's encoders as a cache calls them: each alone, latents in three forms, weighted captions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sdxl import batch_of, config, loaded

from difftrain.contracts import PIXELS, Batch, Parts
from difftrain.models.families.sdxl import SDXLFamily

CAPTIONS = ["a red star", "two (small:1.4) green circles", "(nothing:0.5) at all"]
KEYS = (b"a" * 16, b"b" * 16, b"c" * 16)


def made(how: str, **sections: dict[str, object]) -> tuple[SDXLFamily, Parts, Batch]:
    family, parts = loaded(config({"cache": {"latents_as": how}, "training": {"seed": 1}, **sections}))
    return family, parts, replace(batch_of(family, parts, CAPTIONS), keys=KEYS)


def posterior(family: SDXLFamily, parts: Parts, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    encoder = loaded(config())[0].encoders(parts)["latents"]
    return encoder.encode(batch)["moments"].chunk(2, dim=1)  # type: ignore[return-value]


def scale(parts: Parts) -> float:
    return float(parts.frozen["vae"].config.scaling_factor)


@pytest.mark.flags("cache_latents_as")
@pytest.mark.parametrize("how", ["moments", "mean"])
def test_latents_from_features_are_those_of_online_training(how: str) -> None:
    family, parts, batch = made(how)
    kept = family.encoders(parts)["latents"].encode(batch)
    online, cached = family.latents(batch, parts), family.latents(replace(batch, features=kept), parts)
    assert cached.equal(online)
    mean, std = posterior(family, parts, batch)
    if how == "moments":
        assert set(kept) == {"moments"} and kept["moments"].equal(torch.cat((mean, std), 1))
        assert online.equal((mean + std * batch.draws["moments"]) * scale(parts))
    else:
        assert set(kept) == {"latents"} and kept["latents"].equal(mean) and online.equal(mean * scale(parts))


@pytest.mark.parametrize("how", ["moments", "mean", "sample"])
def test_only_moments_ask_for_a_draw_at_every_use(how: str) -> None:
    family, parts, _ = made(how)
    assert ("moments" in family.features.draws) == (how == "moments")
    (feature,) = family.encoders(parts)["latents"].features.values()
    assert feature.channels == (32 if how == "moments" else 16)


def test_a_sample_is_drawn_once_for_a_picture_whatever_batch_it_is_in() -> None:
    family, parts, batch = made("sample")
    encode = family.encoders(parts)["latents"].encode
    kept = encode(batch)["latents"]
    mean, std = posterior(family, parts, batch)
    noise = (kept - mean) / std
    assert 0.8 < float(noise.std()) < 1.2 and abs(float(noise.mean())) < 0.1
    assert not torch.allclose(noise[0], noise[1], atol=0.1)
    turned = replace(batch, keys=KEYS[::-1], features={"pixels": batch.features["pixels"].flip(0)})
    assert torch.allclose(encode(turned)["latents"].flip(0), kept, atol=1e-5)
    cached = replace(batch, features={"latents": kept}, draws={})
    assert family.latents(cached, parts).equal(kept * scale(parts))


def test_weights_of_tokens_are_part_of_what_an_encoder_takes() -> None:
    family, parts, batch = made("moments", captions={"weighted": True})
    plain, _, _ = made("moments")
    for name, encoder in family.encoders(parts).items():
        if encoder.source == PIXELS:
            continue
        taken = {key: value for key, value in batch.features.items() if key in encoder.inputs}
        assert set(taken) == {f"input_ids_{name[-1]}", f"token_weights_{name[-1]}"}
        found = encoder.encode(replace(batch, features=taken))
        assert found.keys() == encoder.features.keys()
        unweighted = {key: value for key, value in taken.items() if "weights" not in key}
        other = plain.encoders(parts)[name].encode(replace(batch, features=unweighted))
        hidden = next(iter(encoder.features))
        assert torch.allclose(found[hidden][0], other[hidden][0], atol=1e-5)  # nothing weighs here
        assert not torch.allclose(found[hidden][1], other[hidden][1], atol=1e-2)
        online = family.text(batch, parts)
        assert all(value.equal(online[key]) for key, value in found.items())
