"""A VAE's latents as what can be cached: the posterior's moments, its mean, or one sample of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from difftrain.contracts import CONTROL, PIXELS, Batch, Encoder, Feature, Parts, control_name, image_feature
from difftrain.diffusion.draws import normal

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig


MOMENTS = "moments"  # mean and standard deviation of the posterior, one after the other: (2 C, h, w) fp32
LATENTS = "latents"  # one latent a picture, not scaled: (C, h, w) fp32
DROPOUT = "control_dropout"  # draw: below the rate, a sample's references are zeros
SAMPLE_SEED = 0  # of latents that are drawn once: by the picture alone, for every run


def raw_latents(cfg: TrainConfig, batch: Batch, parts: Parts) -> Tensor:
    """Return latents as the VAE makes them, (B, C, h, w) fp32: from the cache, or encoded.

    Of a posterior each use draws its own, by the draw "moments"; with latents_as "mean" its mean is taken.
    """
    features = batch.features
    if LATENTS in features:
        return features[LATENTS]
    mean, std = features[MOMENTS].chunk(2, dim=1) if MOMENTS in features else _posterior(cfg, batch, parts)
    return mean if cfg.cache.latents_as == "mean" else mean + std * batch.draws[MOMENTS]


def _posterior(cfg: TrainConfig, batch: Batch, parts: Parts) -> tuple[Tensor, Tensor]:
    model = cfg.model
    return posterior(
        parts.frozen["vae"], batch.features["pixels"], fp32=model.vae_fp32, batch_size=model.vae_batch_size
    )


def latents_encoder(
    cfg: TrainConfig, parts: Parts, latents: Feature, dtype: torch.dtype, fingerprint: Callable[[str], str]
) -> Encoder:
    """Describe the VAE. latents: of one picture. dtype: of its weights. fingerprint: of what settings make of it."""
    how = cfg.cache.latents_as
    name, channels = (MOMENTS, 2 * latents.channels) if how == "moments" else (LATENTS, latents.channels)
    settings = f"{how} of the posterior in {dtype}"
    if how == "sample":
        settings += f", sampled with seed {SAMPLE_SEED}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        mean, std = _posterior(cfg, batch, parts)
        if how == "moments":
            return {name: torch.cat((mean, std), dim=1)}
        return {name: mean if how == "mean" else mean + std * _noise(batch.keys, mean)}

    return Encoder(
        source=PIXELS,
        features={name: replace(latents, channels=channels)},
        modules=("vae",),
        settings=settings,
        encode=encode,
        fingerprint=lambda: fingerprint(settings),
    )


# --- Latents of reference images: the posterior's mean, as editing pipelines take it


def control_encoder(
    cfg: TrainConfig, parts: Parts, number: int, latents: Feature, dtype: torch.dtype, fingerprint: Callable[[str], str]
) -> Encoder:
    """Describe the VAE over reference image `number`. latents, dtype, fingerprint: as of latents_encoder."""
    name, settings = f"{control_name(number)}_{LATENTS}", f"mean of the posterior in {dtype}"
    return Encoder(
        source=CONTROL,
        features={name: latents},
        modules=("vae",),
        settings=settings,
        encode=lambda batch: {name: _control_mean(cfg, batch, parts, number)},
        fingerprint=lambda: fingerprint(settings),
        reference=number,
    )


def control_latents(cfg: TrainConfig, batch: Batch, parts: Parts, number: int) -> Tensor:
    """Return a reference's latents as the VAE makes them, (B, C, h, w) fp32: from the cache, or encoded."""
    stored = batch.features.get(f"{control_name(number)}_{LATENTS}")
    return _control_mean(cfg, batch, parts, number) if stored is None else stored.float()


def _control_mean(cfg: TrainConfig, batch: Batch, parts: Parts, number: int) -> Tensor:
    model, pixels = cfg.model, batch.features[image_feature(CONTROL, number)]
    return posterior(parts.frozen["vae"], pixels, fp32=model.vae_fp32, batch_size=model.vae_batch_size)[0]


def _noise(keys: tuple[bytes, ...], like: Tensor) -> Tensor:
    """Draw normals of the shape of `like`, each sample's by its key."""
    assert len(keys) == len(like), f"{len(keys)} keys for {len(like)} samples"
    drawn = np.stack([normal(SAMPLE_SEED, key, 0, MOMENTS, like.shape[1:]) for key in keys])
    return torch.from_numpy(drawn).to(like.device)


# --- Latents from pixels, by a frozen VAE


def pixels_to_unit(pixels: Tensor) -> Tensor:
    """Map uint8 pixels to [-1, 1] in fp32."""
    return pixels.float().div_(127.5).sub_(1.0)


@torch.no_grad()
def posterior(vae: Any, pixels: Tensor, *, fp32: bool, batch_size: int | None) -> tuple[Tensor, Tensor]:
    """Encode pictures or clips: mean and standard deviation of their raw latents, in fp32.

    Shapes: pixels (B, 3, [F,] H, W) uint8, or floating in -1..1 -> (B, C, [F',] H / f, W / f) each; a picture is a clip of one frame to a VAE
    of clips. fp32 turns autocast off around the VAE, whose activations overflow fp16 in SDXL. batch_size bounds how many
    are encoded at once. The deviation is 0 where the VAE has no posterior.
    """
    row = CLASSES.get(type(vae).__name__)
    if row is not None and row.clips and pixels.ndim == 4:
        pixels = pixels.unsqueeze(2)
    with torch.autocast(pixels.device.type, enabled=False):
        dtype = torch.float32 if fp32 else next(vae.parameters()).dtype
        pieces = pixels.split(batch_size or len(pixels))
        units = (piece if piece.is_floating_point() else pixels_to_unit(piece) for piece in pieces)
        moments = torch.cat([vae.encode(unit.to(dtype)).latent_dist.parameters for unit in units])
    if row is not None and not row.samples:
        mean = moments.float()
        return mean, torch.zeros_like(mean)
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean, logvar.clamp(-30.0, 20.0).mul(0.5).exp()


# --- One row a class of VAE: how its configuration says channels and factors, and how latents are brought to the denoiser
# Raw latents are as the VAE makes them; latents are scaled as the denoiser takes them. Statistics are a number (scale and
# shift), lists in the configuration (a mean and a deviation a channel), or tensors among the VAE's own weights.


Config = Mapping[str, Any]


@dataclass(frozen=True)
class VaeClass:
    """What differs between classes. channels: the argument that says them. factor, frames: pixels and frames of a latent.

    clips: it takes frames, one where there is a picture. stored: names of mean and deviation (or variance) among its
    weights. folds: latent pixels that are laid into channels before they are normalised. samples: it has a posterior;
    else encoding gives the latents themselves.
    """

    channels: str = "latent_channels"
    factor: Callable[[Config], int] = lambda config: 2 ** (len(config["block_out_channels"]) - 1)
    frames: Callable[[Config], int] = lambda config: 0
    clips: bool = False
    stored: tuple[str, str] | None = None
    folds: int = 1
    samples: bool = True


def _configured(name: str, usual: int) -> Callable[[Config], int]:
    return lambda config: int(config.get(name) or usual)


def _by_downsampling(config: Config) -> int:
    return 2 ** len(config["temperal_downsample"])  # the upstream spelling


_HUNYUAN = VaeClass(
    factor=_configured("spatial_compression_ratio", 8), frames=_configured("temporal_compression_ratio", 4), clips=True
)
_LTX = VaeClass(
    factor=_configured("spatial_compression_ratio", 32),
    frames=_configured("temporal_compression_ratio", 8),
    clips=True,
    stored=("latents_mean", "latents_std"),
)
CLASSES: dict[str, VaeClass] = {
    "AutoencoderKL": VaeClass(),
    "AutoencoderKLWan": VaeClass(
        "z_dim", _configured("scale_factor_spatial", 8), _configured("scale_factor_temporal", 4), clips=True
    ),
    "AutoencoderKLQwenImage": VaeClass("z_dim", _by_downsampling, lambda config: 4, clips=True),
    "AutoencoderKLHunyuanVideo": _HUNYUAN,
    "AutoencoderKLHunyuanVideo15": _HUNYUAN,
    "AutoencoderKLHunyuanImage": VaeClass(factor=_configured("spatial_compression_ratio", 32)),
    "AutoencoderKLCosmos": VaeClass(
        factor=_configured("spatial_compression_ratio", 8),
        frames=_configured("temporal_compression_ratio", 8),
        clips=True,
        samples=False,
    ),
    "AutoencoderKLLTXVideo": _LTX,
    "AutoencoderKLLTX2Video": _LTX,
    "AutoencoderKLFlux2": VaeClass(stored=("bn.running_mean", "bn.running_var"), folds=2),
}


class Latents:
    """Raw latents and latents of one VAE. kind: "library:Class". config: complete sizes.

    statistic: gives a tensor of the VAE's weights by name, where they hold the statistics; asked for once. deviation: that
    latents have for the denoiser, where that is not what the configuration brings them to.
    """

    def __init__(
        self, kind: str, config: Config, statistic: Callable[[str], Tensor] | None = None, deviation: float = 1.0
    ) -> None:
        self.row, self.config, self.deviation = CLASSES[kind.partition(":")[2]], config, deviation
        self._statistic = statistic
        self._mean_std: tuple[Tensor, Tensor] | None = None
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}  # a copy in each step would be waited for

    @property
    def raw_channels(self) -> int:
        """Channels as the VAE makes them."""
        return int(self.config[self.row.channels])

    @property
    def channels(self) -> int:
        """Channels as the denoiser takes them."""
        return self.raw_channels * self.row.folds**2

    @property
    def raw_factor(self) -> int:
        """Pixels along a side of a raw latent pixel."""
        return self.row.factor(self.config)

    @property
    def factor(self) -> int:
        """Pixels along a side of a latent pixel, as the denoiser takes it."""
        return self.raw_factor * self.row.folds

    @property
    def frames(self) -> int:
        """Frames that a latent frame stands for, after the first; 0 for pictures."""
        return self.row.frames(self.config)

    @property
    def longest(self) -> int | None:
        """Frames of the longest clip that there are statistics for; None: of any."""
        mean = self.config.get("latents_mean")
        known = len(mean) // self.raw_channels if isinstance(mean, list | tuple) else 1
        return (known - 1) * self.frames + 1 if known > 1 else None

    def scaled(self, raw: Tensor) -> Tensor:
        """Bring raw latents to the denoiser. Shapes: (B, C, [F,] h, w)."""
        if self.row.folds > 1:
            raw = torch.nn.functional.pixel_unshuffle(raw, self.row.folds)
        if (statistics := self._statistics(raw)) is not None:
            mean, std = statistics
            return (raw - mean) / std * self._scale
        shift = self.config.get("shift_factor") or 0.0
        return (raw - shift) * self._scale

    def unscaled(self, latents: Tensor) -> Tensor:
        """Undo scaled, for decoding."""
        if (statistics := self._statistics(latents)) is not None:
            mean, std = statistics
            raw = latents / self._scale * std + mean
        else:
            raw = latents / self._scale + (self.config.get("shift_factor") or 0.0)
        return raw if self.row.folds == 1 else torch.nn.functional.pixel_shuffle(raw, self.row.folds)

    @property
    def _scale(self) -> float:
        return float(self.config.get("scaling_factor") or 1.0) * self.deviation

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return mean and deviation, shaped for the latents; None where a number stands for all."""
        if self._mean_std is None:
            if self.row.stored is not None:
                assert self._statistic is not None, "this VAE stores its statistics among its weights"
                mean, spread = (self._statistic(name).float() for name in self.row.stored)
                if self.row.stored[1].endswith("var"):
                    spread = torch.sqrt(spread + float(self.config["batch_norm_eps"]))
            elif self.config.get("latents_mean") is not None:
                mean, spread = (torch.tensor(self.config[f"latents_{name}"]) for name in ("mean", "std"))
            else:
                return None
            self._mean_std = mean, spread
        if like.device not in self._on_device:
            mean, std = (statistic.to(like.device, torch.float32) for statistic in self._mean_std)
            self._on_device[like.device] = mean, std
        mean, std = self._on_device[like.device]
        return self._laid_over(mean, like), self._laid_over(std, like)

    def _laid_over(self, statistic: Tensor, like: Tensor) -> Tensor:
        """Shape a statistic for latents: (1, C, [1,] 1, 1), or (1, C, F, 1, 1) where each frame has its own."""
        frames = statistic.numel() // like.shape[1]
        shape = (1, like.shape[1], *((frames,) if like.ndim == 5 else ()), 1, 1)
        laid = statistic.view(shape)
        return laid[:, :, : like.shape[2]] if frames > 1 else laid


def decode(vae: Any, latents: Latents, value: Tensor) -> Tensor:
    """Decode latents, outside of autocast and in the VAE's own dtype. Shapes: (B, C, [F,] h, w) -> (B, 3, [F,] H, W), -1..1."""
    with torch.autocast(value.device.type, enabled=False):
        raw = latents.unscaled(value.float()).to(next(vae.parameters()).dtype)
        # a decoder that takes noise away itself is told that there is none
        noise = (raw.new_zeros(len(raw)),) if getattr(vae.config, "timestep_conditioning", False) else ()
        return vae.decode(raw, *noise, return_dict=False)[0].float()
