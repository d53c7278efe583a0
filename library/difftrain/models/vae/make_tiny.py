"""Make tiny_vae.safetensors, the VAE of the size `tiny`: `python -m difftrain.models.vae.make_tiny FILE`.

Trained by us, on synthetic pictures made here; no other model and no other data went into it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from difftrain.models.build import build
from difftrain.models.materialise import fill
from difftrain.models.vae.fit import closed_form_encoder, psnr, train_decoder
from difftrain.models.vae.shipped import shipped_sizes

if TYPE_CHECKING:
    from torch import Tensor

TRAIN_SEED, TEST_SEED = 1, 2
METADATA = {
    "title": "VAE of the tiny SDXL",
    "origin": "trained by difftrain on synthetic pictures (models/vae/make_tiny.py)",
    "license": "Apache-2.0",
}


def synthetic_pictures(count: int, size: int, seed: int) -> Tensor:
    """Draw (count, 3, size, size) uint8: shapes over plain, shaded or cloudy grounds.

    A third of the grounds is white, a third a gradient between two colours, a third blurred noise.
    """
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([_picture(rng, size, i % 3) for i in range(count)]))


def _picture(rng: np.random.Generator, size: int, ground: int) -> np.ndarray:
    picture = (_white, _gradient, _clouds)[ground](rng, size)
    for _ in range(rng.integers(1, 5)):
        mask = _shape(rng, size)
        picture += mask * (rng.random((3, 1, 1)) - picture)
    return np.rint(picture.clip(0, 1) * 255).astype(np.uint8)


def _white(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.ones((3, size, size))


def _gradient(rng: np.random.Generator, size: int) -> np.ndarray:
    y, x = np.mgrid[:size, :size] / (size - 1) - 0.5
    angle = rng.random() * 2 * np.pi
    t = (np.cos(angle) * x + np.sin(angle) * y) / 1.42 + 0.5
    a, b = rng.random((2, 3, 1, 1))
    return a + (b - a) * t


def _clouds(rng: np.random.Generator, size: int) -> np.ndarray:
    """Blur noise by cutting its spectrum off as a power law."""
    radius = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]) + 1 / size
    spectrum = np.fft.rfft2(rng.standard_normal((3, size, size))) * radius ** -rng.uniform(1.2, 2.5)
    noise = np.fft.irfft2(spectrum, (size, size))
    noise -= noise.mean((1, 2), keepdims=True)
    return rng.random((3, 1, 1)) + noise / noise.std() * rng.uniform(0.05, 0.25)


def _shape(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return the soft mask of an ellipse, a box, or a star with three to seven points, anywhere and turned."""
    y, x = (np.mgrid[:size, :size] + 0.5) / size - rng.uniform(0.15, 0.85, (2, 1, 1))
    angle = rng.random() * 2 * np.pi
    u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    extent = rng.uniform(0.08, 0.35, 2)
    kind = rng.integers(3)
    if kind == 0:
        distance = (np.hypot(u / extent[0], v / extent[1]) - 1) * extent.min()
    elif kind == 1:
        distance = np.maximum(abs(u) - extent[0], abs(v) - extent[1])
    else:
        wave = 1 + rng.uniform(0.1, 0.6) * np.cos(rng.integers(3, 8) * np.arctan2(v, u))
        distance = np.hypot(u, v) - extent[0] * wave / 1.3
    return (0.5 - distance * size).clip(0, 1)[None]


def make(steps: int, count: int) -> torch.nn.Module:
    """Fit tiny's VAE."""
    vae: Any = build("diffusers:AutoencoderKL", "vae", shipped_sizes())
    fill(vae, ((name, torch.zeros(value.shape)) for name, value in vae.state_dict().items()), torch.float32)
    pictures = synthetic_pictures(count, 64, TRAIN_SEED)
    closed_form_encoder(vae, pictures[:1000])
    train_decoder(
        vae, pictures, steps=steps, batch_size=8, report=lambda step, error: print(f"step {step} error {error:.5f}")
    )
    return vae


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pictures", type=int, default=4000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    vae = make(args.steps, args.pictures)
    held_out = psnr(vae, synthetic_pictures(300, 64, TEST_SEED))
    print(f"{time.perf_counter() - start:.0f} s, held-out PSNR {held_out:.2f} dB")
    save(vae, args.file)


def save(vae: torch.nn.Module, path: Path) -> None:
    """Write the weights in fp16, without the tensors that are all zeros (most of the encoder)."""
    from safetensors.torch import save_file

    tensors = {name: value.half().contiguous() for name, value in vae.state_dict().items() if value.any()}
    save_file(tensors, path, METADATA)


if __name__ == "__main__":
    main()
