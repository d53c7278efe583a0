"""Random weights: a function of seed and name alone, with torch's and CLIP's scales."""

from __future__ import annotations

import torch
from torch import nn

from difftrain.models.weights.initial import by_fan_in, clip_scale, initial_weights


def module(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, width, 3), nn.GroupNorm(4, width), nn.Linear(width, 512))


def weights(net: nn.Module, seed: int = 1, part: str = "unet") -> dict[str, torch.Tensor]:
    return dict(initial_weights(net, part, seed, by_fan_in))


def test_scales_are_those_of_torch() -> None:
    torch.manual_seed(0)
    net = module(width=1024)
    found = weights(net)
    for name, param in net.named_parameters():
        if name.startswith("1."):
            assert found[name].equal(torch.ones_like(param) if name.endswith("weight") else torch.zeros_like(param))
        else:
            assert abs(found[name].std() / param.std() - 1) < 0.1, name


def test_same_on_any_number_of_threads_and_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = module()
    kept = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = weights(net)
        torch.set_num_threads(3)
        second = weights(module())
    finally:
        torch.set_num_threads(kept)
    assert all(value.equal(second[name]) for name, value in first.items())


def test_seed_part_and_name_all_count() -> None:
    base, other_seed, other_part = weights(module()), weights(module(), seed=2), weights(module(), part="vae")
    assert not base["0.weight"].equal(other_seed["0.weight"])
    assert not base["0.weight"].equal(other_part["0.weight"])
    assert not base["0.bias"].equal(base["2.bias"][:64])


def test_values_are_golden() -> None:
    """Changing them changes every run from a seed: raise STREAM_VERSION then."""
    net = nn.Linear(3, 2)
    found = torch.cat([value.flatten() for value in weights(net).values()])
    expected = torch.tensor(GOLDEN)
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)


def test_text_encoders_start_as_transformers_starts_them() -> None:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(0)
    size = {"vocab_size": 600, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    size |= {"num_attention_heads": 2, "projection_dim": 96, "bos_token_id": 1, "eos_token_id": 2}
    model = CLIPTextModelWithProjection(CLIPTextConfig(**size))
    found = dict(initial_weights(model, "text_encoder_2", 1, clip_scale(4, 128)))
    for name, param in model.named_parameters():
        theirs = param.std() if param.numel() > 1 else param
        assert abs(found[name].std() - theirs) < 0.1 * theirs + 1e-7, name


GOLDEN = [-0.283772469, 0.186000824, 0.500570297, 0.268851608, 0.163269043, 0.263836563, 0.53582418, 0.411435455]
