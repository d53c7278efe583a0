"""The demo's model: every part of the real SDXL, small and from a seed, with a VAE fitted to the demo's own pictures."""

from __future__ import annotations

import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config import ModelSection, TrainConfig, TrainingSection
from difftrain.data.media import decode
from difftrain.models.registry import make_family
from difftrain.models.vae.fit import closed_form_encoder, psnr, train_decoder
from difftrain.train.demo import recipe

if TYPE_CHECKING:
    from torch import Tensor

ENCODER_PICTURES = 1500  # the encoder's directions change no more with further ones
HELD_OUT = 64
WHITEN = 0.5  # of the patch components' unequal variances, half is kept (as logarithms): large forms stay strong


def write_model(dataset: str, scale: float, data: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Build the model, fit its VAE to the pictures of `data`, and save all as a diffusers folder."""
    cfg = TrainConfig(
        model=ModelSection(init_from_config="demo", prediction_type="v_prediction"),
        training=TrainingSection(seed=recipe.SEED),
    )
    family = make_family(cfg)
    parts = family.load()
    steps = round(recipe.SIZES[dataset].vae_steps * scale**0.5)  # with too few, pictures of any UNet are a blur
    fit_vae(parts.frozen["vae"], load_pictures(data), steps, say)
    weights = ((name, value.detach()) for name, value in parts.root.named_parameters())
    family.export(weights, parts, "diffusers_safetensors", folder)


def load_pictures(data: Path) -> Tensor:
    """Read every picture of a folder of tars as training sees it. Shape: (N, 3, side, side) uint8."""
    pictures = []
    for path in sorted(data.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith((".png", ".webp")):
                    stream = tar.extractfile(member)
                    assert stream is not None
                    pictures.append(_shrink(torch.tensor(decode(stream.read()))))
    return torch.stack(pictures)


def _shrink(rgb: Tensor) -> Tensor:
    """Average (H, W, 3) down to (3, side, side)."""
    x = rgb.movedim(-1, 0)
    if x.shape[1] == recipe.SIDE:
        return x.contiguous()
    return torch.nn.functional.interpolate(x[None].float(), size=recipe.SIDE, mode="area")[0].round().byte()


def fit_vae(vae: Any, pictures: Tensor, steps: int, say: Callable[[str], None]) -> None:
    """Fit the encoder in closed form and train the decoder; say how well it reconstructs pictures it has not seen."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(recipe.SEED))
    held_out, seen = pictures[order[:HELD_OUT]], pictures[order[HELD_OUT:]]
    started = time.monotonic()
    vae.to(memory_format=torch.channels_last)  # two to three times as fast on a CPU at these widths
    closed_form_encoder(vae, seen[:ENCODER_PICTURES], whiten=WHITEN)
    train_decoder(vae, seen, steps=steps, seed=recipe.SEED)
    vae.to(memory_format=torch.contiguous_format)
    spent = time.monotonic() - started
    say(f"VAE fitted to them in {spent:.0f} s: {psnr(vae, held_out):.1f} dB on pictures it has not seen")
