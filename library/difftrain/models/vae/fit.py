"""A small VAE that reconstructs after a minute on one core: its encoder in closed form, its decoder trained.

The encoder is the PCA of f x f patches, level by level of 2 x 2, written into the weights of a plain AutoencoderKL, or of
AutoencoderKLQwenImage: of its causal convolutions an image, one frame, is seen by the last tap in time alone.
residual blocks and attention add nothing, the strided convolutions are the bases. The last norm and SiLU are undone:
constant channels K and -K in each group fix its deviation at K sqrt(2 / g), so that the norm divides by a constant and
SiLU is x / 2 to within x^2 / 4 for x = z / K; a channel that holds nothing shows what the norm subtracted, and the last
convolution gives it back. So rounding in the sums of a group, which depends on batch and device, cancels as well.
Where a norm subtracts nothing (Qwen's, of all channels at once), the same holds with one group and an empty offset.
Trained end to end, a VAE of this size stays several dB behind in the same time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from difftrain.models.build import build
from difftrain.models.placeholder import fill
from difftrain.models.vae.latents import pixels_to_unit, posterior
from difftrain.models.weights.initial import by_fan_in, initial_weights
from difftrain.models.weights.source import shipped_sizes

if TYPE_CHECKING:
    from torch import Tensor


BIG = 16384.0  # the constant channels: exact in every float type
POSTERIOR_STD = 0.02  # of the latents' own deviation


def patches(x: Tensor) -> Tensor:
    """Cut (N, C, H, W) into the 2 x 2 patches that a strided convolution sees: (N, 4 C, H / 2, W / 2)."""
    return F.pixel_unshuffle(x, 2)


def principal(x: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the first principal directions (num, C) of channel vectors, and their variances; signs are fixed."""
    flat = x.movedim(1, -1).flatten(0, -2).double()
    centred = flat - flat.mean(0)
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    # signs are free in an eigenbasis: the largest entry is made positive
    order = variances.argsort(descending=True)[:num]
    basis = directions[:, order].T
    largest = basis.gather(1, basis.abs().argmax(1, keepdim=True))
    return (basis * largest.sign()).float(), variances[order].float()


class _EncoderLayers(NamedTuple):
    """What of an encoder is written: of each level its width and first residual block, between levels a strided convolution.

    groups: of the last norm. latents: channels of a latent. scaling: what the denoiser multiplies them by.
    """

    widths: list[int]
    residual: list[Any]
    strided: list[Any]
    norm_weight: Tensor
    groups: int
    latents: int
    scaling: float


def _layers_of(vae: Any) -> _EncoderLayers:
    config, encoder = vae.config, vae.encoder
    if hasattr(config, "block_out_channels"):
        return _EncoderLayers(
            list(config.block_out_channels),
            [block.resnets[0] for block in encoder.down_blocks],
            [block.downsamplers[0].conv for block in encoder.down_blocks[:-1]],
            encoder.conv_norm_out.weight,
            config.norm_num_groups,
            config.latent_channels,
            config.scaling_factor,
        )
    # one flat list: residual blocks of a level, then what halves both sides
    blocks = list(encoder.down_blocks)
    ends = [number for number, block in enumerate(blocks) if hasattr(block, "resample")]
    firsts = [0, *(number + 1 for number in ends)]
    return _EncoderLayers(
        [config.base_dim * factor for factor in config.dim_mult],
        [blocks[number] for number in firsts],
        [blocks[number].resample[1] for number in ends],
        encoder.norm_out.gamma,
        1,
        config.z_dim,
        1.0,
    )


@torch.no_grad()
def closed_form_encoder(vae: Any, pictures: Tensor, *, whiten: float = 1.0) -> None:
    """Write the patch PCA of pictures into a VAE's encoder, in place.

    Shape: pictures (N, 3, H, W) uint8. whiten: 1 gives every latent channel the same variance, 0 keeps the PCA's; in
    both cases latents times scaling_factor have variance 1 on average. Raises ValueError where the last block is too
    narrow for the latents and the constants.
    """
    layers = _layers_of(vae)
    plan, widths = _channel_plan(layers), layers.widths
    for param in (*vae.encoder.parameters(), *vae.quant_conv.parameters()):
        param.zero_()
    x = pixels_to_unit(pictures)
    _copy_channels(vae.encoder.conv_in, 3)
    for i, (residual, strided) in enumerate(zip(layers.residual, layers.strided)):
        _pass_on(residual, x.shape[1])
        # the last level keeps what becomes latents, the others what the next one has room for
        room = layers.latents if i == len(widths) - 2 else min(widths[i], widths[i + 1])
        basis, _ = principal(patches(x), min(4 * x.shape[1], room))
        _place_strided(strided, basis)
        x = torch.einsum("kc,nchw->nkhw", basis, patches(x))
    _finish(vae, layers, plan, *_standardised(x, whiten, layers.scaling))


@torch.no_grad()
def hold_frames(vae: Any) -> None:
    """Let a VAE of clips see every fourth frame and hold it, in place: what was fitted to images alone knows no other.

    Of causal convolutions the last tap in time stays, which sees the frame itself; what halves time keeps the last of
    two frames, and what doubles it shows each twice.
    """
    for conv in vae.modules():
        if isinstance(conv, torch.nn.Conv3d) and conv.kernel_size[0] > 1:
            conv.weight[:, :, :-1] = 0.0
    for module in vae.modules():
        conv = getattr(module, "time_conv", None)
        if conv is not None:
            conv.weight.zero_()
            conv.bias.zero_()
            width = conv.in_channels
            for start in range(0, conv.out_channels, width):
                conv.weight[range(start, start + width), range(width), -1, 0, 0] = 1.0


def _channel_plan(layers: _EncoderLayers) -> list[list[int]]:
    """Give every group of the last norm its share of latent channels."""
    groups, width = layers.groups, layers.widths[-1]
    share = -(-layers.latents // groups)
    if width // groups < share + 3:
        raise ValueError(
            f"{width} channels in {groups} groups leave {width // groups} each; {share} latent channels, two constants "
            f"and an empty one need {share + 3}"
        )
    latents = list(range(layers.latents))
    return [latents[g * share : (g + 1) * share] for g in range(groups)]


def _taps(conv: Any) -> Tensor:
    """Return a view of what a convolution multiplies an image by: (out, in, k, k)."""
    return conv.weight[:, :, -1] if conv.weight.ndim == 5 else conv.weight


def _copy_channels(conv: Any, num: int) -> None:
    """Make a convolution copy its first channels."""
    middle = conv.kernel_size[-1] // 2
    _taps(conv)[range(num), range(num), middle, middle] = 1.0


def _shortcut_of(resnet: Any) -> Any:
    """Return the convolution around a residual block that changes the width; None: it keeps it."""
    return None if isinstance(resnet.conv_shortcut, torch.nn.Identity) else resnet.conv_shortcut


def _pass_on(resnet: Any, num: int) -> None:
    """Make a residual block whose branch is zero keep its first channels."""
    shortcut = _shortcut_of(resnet)
    if shortcut is not None:
        _copy_channels(shortcut, num)


def _place_strided(conv: Any, basis: Tensor) -> None:
    """Write a basis over 2 x 2 patches into a 3 x 3 convolution of stride 2, which pads at the far sides only."""
    conv.weight[: len(basis), : basis.shape[1] // 4, :2, :2] = basis.unflatten(1, (-1, 2, 2))


def _standardised(x: Tensor, whiten: float, scaling: float) -> tuple[Tensor, Tensor]:
    """Return (scale, shift) of each component so that scale x + shift is what the VAE is to encode."""
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
    kept = std.clamp(min=1e-6) ** -whiten
    kept /= (std * kept).square().mean().sqrt() * scaling
    return kept, -mean * kept


def _finish(vae: Any, layers: _EncoderLayers, plan: list[list[int]], scale: Tensor, shift: Tensor) -> None:
    """Standardise the components beside their constants, and take them through the last norm, SiLU and convolution."""
    latents, size = layers.latents, layers.widths[-1] // layers.groups
    spread = torch.zeros(layers.widths[-1], len(scale))
    bias = torch.zeros(len(spread))
    out = _taps(vae.encoder.conv_out)
    for g, members in enumerate(plan):
        if not members:
            continue
        start, reference = g * size, g * size + 2
        # two huge constants fix the deviation of a group, so that its norm is a known factor
        bias[start], bias[start + 1] = BIG, -BIG
        for row, channel in enumerate(members, start=reference + 1):
            spread[row, channel], bias[row] = scale[channel], shift[channel]
            out[channel, row, 1, 1] = 2 * BIG * (2 / size) ** 0.5
            # an empty channel beside them takes the norm's and SiLU's offset away again
            out[channel, reference, 1, 1] = -out[channel, row, 1, 1]
    _place_last(layers, spread, bias)
    layers.norm_weight.fill_(1.0)
    vae.encoder.conv_out.bias[latents:] = 2 * torch.log(torch.tensor(POSTERIOR_STD / layers.scaling))
    _copy_channels(vae.quant_conv, 2 * latents)


def _place_last(layers: _EncoderLayers, spread: Tensor, bias: Tensor) -> None:
    """Apply a linear map behind the last strided convolution: in the next block's shortcut, or in itself."""
    shortcut = _shortcut_of(layers.residual[-1])
    if shortcut is not None:
        _taps(shortcut)[:, : spread.shape[1], 0, 0] = spread
        shortcut.bias.copy_(bias)
        return
    conv = layers.strided[-1]
    conv.weight.copy_(torch.einsum("ok,kchw->ochw", spread, conv.weight[: spread.shape[1]].clone()))
    conv.bias.copy_(bias)


REPORT_STEPS = 25


def train_decoder(
    vae: Any,
    pictures: Tensor,
    *,
    steps: int,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> None:
    """Train the decoder alone, from weights of the seed, on what the encoder makes of pictures; in place.

    Shape: pictures (N, 3, H, W) uint8. Adam on the mean squared error, its rate warmed up and brought to zero along a
    cosine. report(step, error) is called every 25 steps.
    """
    # --- weights of the seed, and what updates them
    generator = torch.Generator().manual_seed(seed)
    modules = {"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv}
    for part, module in modules.items():
        values = dict(initial_weights(module, f"vae.{part}", seed, by_fan_in))
        gains = {name: torch.ones_like(value) for name, value in values.items() if name.endswith(".gamma")}
        module.load_state_dict(values | gains)
    channels_last(vae)
    params = [p.requires_grad_(True) for module in modules.values() for p in module.parameters()]
    device = params[0].device
    optimizer = torch.optim.Adam(params, lr=learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)

    # --- steps
    for step in range(1, steps + 1):
        picked = torch.randint(len(pictures), (batch_size,), generator=generator)
        target = pictures[picked].to(device)
        with torch.no_grad():
            mean, std = posterior(vae, target, fp32=True, batch_size=None)
            latents = mean + std * torch.randn(mean.shape, generator=generator).to(device)
        with _one_frame(vae.decoder):
            error = F.mse_loss(_decoded(vae, latents), pixels_to_unit(target))
        optimizer.zero_grad(set_to_none=True)
        error.backward()
        optimizer.step()
        schedule.step()
        if report is not None and step % REPORT_STEPS == 0:
            report(step, float(error.detach()))

    vae.requires_grad_(False)
    vae.to(memory_format=torch.contiguous_format)


def channels_last(vae: Any) -> None:
    """Lay a VAE's weights out so that a CPU computes two to three times as fast at such widths."""
    for param in vae.parameters():
        if param.ndim in (4, 5):
            param.data = param.data.to(memory_format=(torch.channels_last, torch.channels_last_3d)[param.ndim - 4])


@contextmanager
def _one_frame(module: Any) -> Iterator[None]:
    """Let causal convolutions leave out the taps that meet no frame of an image: a third of the work, the same result."""
    convs: list[Any] = [conv for conv in module.modules() if isinstance(conv, torch.nn.Conv3d)]
    for conv in convs:
        conv.forward = partial(_last_tap, conv)
    try:
        yield
    finally:
        for conv in convs:
            del conv.forward


def _last_tap(conv: Any, x: Tensor) -> Tensor:
    """Run a causal convolution of stride 1 over one frame. Shapes: (N, C, 1, H, W) -> (N, D, 1, H, W)."""
    return F.conv2d(x[:, :, 0], _taps(conv), conv.bias, padding=conv.kernel_size[-1] // 2).unsqueeze(2)


def _decoded(vae: Any, latents: Tensor) -> Tensor:
    """Decode latents of images, without the bounds that some classes set in the end. Shapes: (N, C, [1,] h, w) -> (N, 3, H, W)."""
    pixels = vae.decoder(vae.post_quant_conv(latents))
    return pixels[:, :, 0] if pixels.ndim == 5 else pixels


@torch.no_grad()
def psnr(vae: Any, pictures: Tensor) -> float:
    """Return the mean over pictures of the peak signal-to-noise ratio of decode(encode(x)), in dB."""
    mean, _ = posterior(vae, pictures, fp32=True, batch_size=None)
    return psnr_of(_decoded(vae, mean).clamp(-1, 1), pixels_to_unit(pictures))


def psnr_of(image: Tensor, target: Tensor) -> float:
    """Return the mean over pictures of 10 log10(4 / mean squared error) for values in [-1, 1], in dB."""
    return float(10 * torch.log10(4 / (image - target).square().flatten(1).mean(1)).mean().detach())


# --- Make tiny_vae.safetensors, the VAE of the size `tiny`: `python -m difftrain.models.vae.fit FILE`
# Trained by us, on synthetic pictures made here; no other model and no other data went into it.


TRAIN_SEED, TEST_SEED = 1, 2
METADATA = {
    "title": "VAE of the tiny SDXL",
    "origin": "trained by difftrain on synthetic pictures (models/vae/fit.py)",
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
