"""Every class of VAE that families have: sizes, statistics and what its pipeline decodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from difftrain.contracts import Bucket, Feature
from difftrain.models import build as sizes
from difftrain.models.build import build
from difftrain.models.vae.latents import CLASSES, Latents, decode, posterior

GIVEN: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [32, 32, 32, 32], "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159,
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3, "out_channels": 3, "latent_channels": 64, "block_out_channels": [128, 128, 128, 128, 128, 128],
        "layers_per_block": 1, "spatial_compression_ratio": 32, "sample_size": 384, "scaling_factor": 0.75289,
    },
}  # fmt: skip
CASES = sorted(CLASSES)


def made(kind: str) -> tuple[Latents, Any]:
    """Make a class's latents, with statistics that are not trivial, and the VAE without its weights."""
    given = GIVEN.get(kind, {})
    vae: Any = build(f"diffusers:{kind}", "vae", given)
    config = sizes.complete(f"diffusers:{kind}", given)
    generator = torch.Generator().manual_seed(1)
    for name in CLASSES[kind].stored or ():
        owner, _, leaf = name.rpartition(".")
        buffers = vae.get_submodule(owner)._buffers
        buffers[leaf] = 0.5 + torch.rand(buffers[leaf].shape, generator=generator)
    return Latents(f"diffusers:{kind}", config, lambda name: vae.state_dict()[name]), vae


def raw_of(latents: Latents, frames: int) -> torch.Tensor:
    """Draw raw latents of an odd size; of a VAE of clips with frames."""
    shape = Feature(latents.raw_channels, latents.raw_factor, frames=latents.frames).shape(
        Bucket(6 * latents.raw_factor, 8 * latents.raw_factor, 1 + (frames - 1) * max(1, latents.frames))
    )
    return torch.randn((2, *shape), generator=torch.Generator().manual_seed(2))


# ------------------------------------------------------------------ what pipelines hand to their VAE's decode


def _scaled(z: torch.Tensor, vae: Any) -> torch.Tensor:
    """FluxPipeline, StableDiffusion3Pipeline."""
    return (z / vae.config.scaling_factor) + vae.config.shift_factor


def _plain(z: torch.Tensor, vae: Any) -> torch.Tensor:
    """HunyuanVideoPipeline, HunyuanVideo15Pipeline, HunyuanImagePipeline."""
    return z / vae.config.scaling_factor


def _listed(z: torch.Tensor, vae: Any) -> torch.Tensor:
    """WanPipeline, QwenImagePipeline."""
    mean = torch.tensor(vae.config.latents_mean).view(1, vae.config.z_dim, 1, 1, 1)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, vae.config.z_dim, 1, 1, 1)
    return z / std + mean


def _by_frame(z: torch.Tensor, vae: Any) -> torch.Tensor:
    """CosmosTextToWorldPipeline, but for sigma_data, which is its objective's."""
    shape = (1, vae.config.latent_channels, -1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape)[:, :, : z.size(2)]
    return z * torch.tensor(vae.config.latents_std).view(shape)[:, :, : z.size(2)] + mean


def _of_weights(z: torch.Tensor, vae: Any) -> torch.Tensor:
    from diffusers import LTXPipeline

    return LTXPipeline._denormalize_latents(z, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


def _folded(z: torch.Tensor, vae: Any) -> torch.Tensor:
    from diffusers import Flux2Pipeline

    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return Flux2Pipeline._unpatchify_latents(z * std + mean)


DECODED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "AutoencoderKL": _scaled,
    "AutoencoderKLWan": _listed,
    "AutoencoderKLQwenImage": _listed,
    "AutoencoderKLHunyuanVideo": _plain,
    "AutoencoderKLHunyuanVideo15": _plain,
    "AutoencoderKLHunyuanImage": _plain,
    "AutoencoderKLCosmos": _by_frame,
    "AutoencoderKLLTXVideo": _of_weights,
    "AutoencoderKLLTX2Video": _of_weights,
    "AutoencoderKLFlux2": _folded,
}


def test_every_class_is_held_to_its_pipeline() -> None:
    assert set(DECODED) == set(CLASSES)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("frames", [1, 3])
def test_scaling_is_undone_and_is_the_pipelines(kind: str, frames: int) -> None:
    latents, vae = made(kind)
    raw = raw_of(latents, frames)
    scaled = latents.scaled(raw)
    assert scaled.shape[1] == latents.channels and not torch.equal(scaled, raw)
    torch.testing.assert_close(latents.unscaled(scaled), raw, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(latents.unscaled(scaled), DECODED[kind](scaled, vae), rtol=1e-5, atol=1e-5)
    assert scaled.shape[-2] * latents.factor == raw.shape[-2] * latents.raw_factor


@pytest.mark.parametrize("kind", CASES)
def test_sizes_are_those_of_what_it_encodes_and_decodes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())  # knows no meta device
    latents, vae = made(kind)
    vae, count = vae.to("meta"), 2
    frames = 1 + 2 * latents.frames if latents.row.clips else 1
    bucket = Bucket(2 * latents.factor, 4 * latents.factor, frames)
    clip = (frames,) if latents.row.clips else ()
    pixels = torch.zeros((1, 3, *clip, bucket.height, bucket.width), dtype=torch.uint8, device="meta")
    mean, std = posterior(vae, pixels.expand(count, *pixels.shape[1:]), fp32=True, batch_size=1)
    shape = Feature(latents.raw_channels, latents.raw_factor, frames=latents.frames).shape(bucket)
    assert mean.shape == std.shape == (count, *shape)
    folded = (count, latents.channels, *shape[1:-2], bucket.height // latents.factor, bucket.width // latents.factor)
    blank = Latents(f"diffusers:{kind}", latents.config, lambda name: vae.state_dict()[name])
    assert blank.scaled(mean).shape == folded
    # one at a time: diffusers' HunyuanVideo15 masks attention for one sample, and decodes no batch of two
    assert decode(vae, blank, blank.scaled(mean[:1])).shape == (1, 3, *clip, bucket.height, bucket.width)
    if latents.row.clips:  # a picture is a clip of one frame
        picture = posterior(vae, pixels[:, :, 0], fp32=True, batch_size=None)[0]
        assert picture.shape == (1, shape[0], 1, *shape[2:])
