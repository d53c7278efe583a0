"""The fitted VAE: an encoder that is a PCA of patches exactly, a decoder that learns, the shipped weights."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from difftrain.models.build import build
from difftrain.models.placeholder import fill
from difftrain.models.vae.fit import (
    TEST_SEED,
    closed_form_encoder,
    principal,
    psnr,
    psnr_of,
    synthetic_pictures,
    train_decoder,
)
from difftrain.models.vae.latents import pixels_to_unit
from difftrain.models.weights.source import shipped_sizes, shipped_vae

FACTOR_4 = {
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [12, 16, 24],
    "latent_channels": 8,
    "norm_num_groups": 2,
    "scaling_factor": 0.25,
}


def vae_of(**sizes: Any) -> Any:
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        vae = AutoencoderKL(**sizes)
    return fill(vae, ((name, torch.zeros(v.shape)) for name, v in vae.state_dict().items()), torch.float32)


@cache
def pictures() -> torch.Tensor:
    return synthetic_pictures(120, 64, 5)


@cache
def shipped() -> Any:
    vae = build("diffusers:AutoencoderKL", "vae", shipped_sizes())
    return fill(vae, shipped_vae(vae), torch.float32).requires_grad_(False)


def patch_pca(x: torch.Tensor, widths: list[int], latents: int) -> torch.Tensor:
    """Level by level of 2 x 2, as the encoder is to do it, whitened."""
    for i in range(len(widths) - 1):
        x = F.pixel_unshuffle(x, 2)
        room = latents if i == len(widths) - 2 else min(widths[i], widths[i + 1])
        basis, _ = principal(x, min(x.shape[1], room))
        x = torch.einsum("kc,nchw->nkhw", basis, x)
    return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


@pytest.mark.parametrize(
    "sizes", [FACTOR_4, FACTOR_4 | {"block_out_channels": [12, 24, 24]}, FACTOR_4 | {"norm_num_groups": 4, "latent_channels": 4}]
)  # fmt: skip
def test_the_encoder_is_the_pca(sizes: dict[str, Any]) -> None:
    """Also where the last block has no shortcut to carry the constants, and where a group holds one latent."""
    vae = vae_of(**sizes)
    closed_form_encoder(vae, pictures())
    x = pixels_to_unit(pictures()[:20])
    with torch.no_grad():
        posterior = vae.encode(x).latent_dist
    expected = patch_pca(pixels_to_unit(pictures()), sizes["block_out_channels"], sizes["latent_channels"])[:20]
    error = posterior.mean * 0.25 - expected
    assert error.square().mean().sqrt() < 2e-3
    assert (error.abs() <= 2e-3 + 5e-3 * expected.abs()).all()  # SiLU's x^2 / 4 shows far from the mean
    assert torch.allclose(posterior.std * 0.25, torch.tensor(0.02), rtol=1e-3)


CLIPS = {
    "base_dim": 12, "z_dim": 8, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True],
    "latents_mean": [0.0] * 8, "latents_std": [1.0] * 8,
}  # fmt: skip


def vae_of_clips(**sizes: Any) -> Any:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(**CLIPS | sizes).requires_grad_(False)


@pytest.mark.parametrize("sizes", [{}, {"dim_mult": [1, 1, 2]}, {"num_res_blocks": 2}])
def test_so_is_that_of_a_vae_of_clips_over_one_frame(sizes: dict[str, Any]) -> None:
    vae = vae_of_clips(**sizes)
    closed_form_encoder(vae, pictures())
    with torch.no_grad():
        posterior = vae.encode(pixels_to_unit(pictures()[:20]).unsqueeze(2)).latent_dist
    widths = [CLIPS["base_dim"] * factor for factor in vae.config.dim_mult]
    expected = patch_pca(pixels_to_unit(pictures()), widths, 8)[:20]
    error = posterior.mean[:, :, 0] - expected
    assert posterior.mean.shape[2] == 1 and error.square().mean().sqrt() < 2e-3
    assert (error.abs() <= 2e-3 + 5e-3 * expected.abs()).all()
    assert torch.allclose(posterior.std, torch.tensor(0.02), rtol=1e-3)


def test_a_decoder_of_clips_is_trained_by_what_one_frame_meets() -> None:
    """Two steps: what is decoded then is what the class itself makes of the latents, which training computed otherwise."""
    vae = vae_of_clips()
    few = pictures()[:6, :, :32, :32].contiguous()
    closed_form_encoder(vae, few)
    train_decoder(vae, few, steps=2, batch_size=2)
    x = pixels_to_unit(few)
    with torch.no_grad():
        decoded = vae.decode(vae.encode(x.unsqueeze(2)).latent_dist.mean).sample[:, :, 0]
    assert abs(psnr(vae, few) - psnr_of(decoded, x)) < 1e-4


def test_whitening_is_a_choice() -> None:
    white, plain = vae_of(**FACTOR_4), vae_of(**FACTOR_4)
    closed_form_encoder(white, pictures())
    closed_form_encoder(plain, pictures(), whiten=0.0)
    x = pixels_to_unit(pictures())
    with torch.no_grad():
        deviations = [vae.encode(x).latent_dist.mean.std((0, 2, 3)) * 0.25 for vae in (white, plain)]
    assert (deviations[0] - 1).abs().max() < 0.02
    assert deviations[1].max() > 2 > 0.5 > deviations[1].min()
    assert abs(deviations[1].square().mean() - 1) < 0.02


def test_too_narrow_a_block_is_named() -> None:
    vae = vae_of(**FACTOR_4 | {"block_out_channels": [12, 16, 12]})
    with pytest.raises(ValueError, match="12 channels in 2 groups leave 6 each; 4 latent channels"):
        closed_form_encoder(vae, pictures())


@pytest.mark.nightly
def test_the_decoder_learns_and_is_the_same_twice() -> None:
    def trained() -> tuple[Any, float]:
        vae = vae_of(**FACTOR_4)
        closed_form_encoder(vae, pictures())
        before = {name: value.clone() for name, value in vae.encoder.state_dict().items()}
        train_decoder(vae, pictures()[:, :, :32, :32].contiguous(), steps=40, batch_size=8, learning_rate=1e-2)
        assert all(value.equal(before[name]) for name, value in vae.encoder.state_dict().items())
        assert not any(p.requires_grad for p in vae.parameters())
        return vae, psnr(vae, pictures()[:20])

    (first, found), (second, _) = trained(), trained()
    x = pixels_to_unit(pictures()[:20])
    assert found > psnr_of(x.mean((0, 2, 3), keepdim=True).expand_as(x), x) + 2
    assert all(value.equal(second.state_dict()[name]) for name, value in first.state_dict().items())


def test_the_shipped_vae_reconstructs_pictures_that_it_has_not_seen() -> None:
    """26 dB, where each picture's mean colour gives 14."""
    held_out = synthetic_pictures(60, 64, TEST_SEED)
    x = pixels_to_unit(held_out)
    baseline = psnr_of(x.mean((2, 3), keepdim=True).expand_as(x), x)
    assert baseline < 15
    assert psnr(shipped(), held_out) > 25.5


def test_the_shipped_vae_at_other_sizes() -> None:
    wide = F.interpolate(synthetic_pictures(8, 64, TEST_SEED).float(), (96, 128)).byte()
    assert psnr(shipped(), wide) > 25


def test_its_latents_have_variance_one() -> None:
    with torch.no_grad():
        latents = shipped().encode(pixels_to_unit(synthetic_pictures(60, 64, TEST_SEED))).latent_dist.mean
    scaled = latents * shipped_sizes()["scaling_factor"]
    assert abs(scaled.std() - 1) < 0.1 and scaled.std((0, 2, 3)).min() > 0.7


def test_the_file_is_small_and_says_what_it_is() -> None:
    with resources.as_file(resources.files("difftrain.models.vae") / "tiny_vae.safetensors") as path:
        assert path.stat().st_size < 200_000
        with safe_open(path, "pt") as file:
            assert "synthetic pictures" in file.metadata()["origin"]
