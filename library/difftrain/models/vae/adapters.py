"""One row a class of VAE: how its configuration says channels and factors, and how latents are brought to the denoiser.

Raw latents are as the VAE makes them; latents are scaled as the denoiser takes them. Statistics are a number (scale and
shift), lists in the configuration (a mean and a deviation a channel), or tensors among the VAE's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

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


def _says(name: str, usual: int) -> Callable[[Config], int]:
    return lambda config: int(config.get(name) or usual)


def _by_downsampling(config: Config) -> int:
    return 2 ** len(config["temperal_downsample"])  # the upstream spelling


_HUNYUAN = VaeClass(
    factor=_says("spatial_compression_ratio", 8), frames=_says("temporal_compression_ratio", 4), clips=True
)
_LTX = VaeClass(
    factor=_says("spatial_compression_ratio", 32),
    frames=_says("temporal_compression_ratio", 8),
    clips=True,
    stored=("latents_mean", "latents_std"),
)
CLASSES: dict[str, VaeClass] = {
    "AutoencoderKL": VaeClass(),
    "AutoencoderKLWan": VaeClass(
        "z_dim", _says("scale_factor_spatial", 8), _says("scale_factor_temporal", 4), clips=True
    ),
    "AutoencoderKLQwenImage": VaeClass("z_dim", _by_downsampling, lambda config: 4, clips=True),
    "AutoencoderKLHunyuanVideo": _HUNYUAN,
    "AutoencoderKLHunyuanVideo15": _HUNYUAN,
    "AutoencoderKLHunyuanImage": VaeClass(factor=_says("spatial_compression_ratio", 32)),
    "AutoencoderKLCosmos": VaeClass(
        factor=_says("spatial_compression_ratio", 8),
        frames=_says("temporal_compression_ratio", 8),
        clips=True,
        samples=False,
    ),
    "AutoencoderKLLTXVideo": _LTX,
    "AutoencoderKLLTX2Video": _LTX,
    "AutoencoderKLFlux2": VaeClass(stored=("bn.running_mean", "bn.running_var"), folds=2),
}


class Latents:
    """Raw latents and latents of one VAE. kind: "library:Class". config: complete sizes.

    statistic: gives a tensor of the VAE's weights by name, where they hold the statistics; asked for once.
    """

    def __init__(self, kind: str, config: Config, statistic: Callable[[str], Tensor] | None = None) -> None:
        self.row, self.config = CLASSES[kind.partition(":")[2]], config
        self._statistic = statistic
        self._mean_std: tuple[Tensor, Tensor] | None = None

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
        return float(self.config.get("scaling_factor") or 1.0)

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return mean and deviation, shaped for the latents; None where a number stands for all."""
        if self._mean_std is None:
            if self.row.stored is not None:
                assert self._statistic is not None, "this VAE's statistics lie among its weights"
                mean, spread = (self._statistic(name).float() for name in self.row.stored)
                if self.row.stored[1].endswith("var"):
                    spread = torch.sqrt(spread + float(self.config["batch_norm_eps"]))
            elif self.config.get("latents_mean") is not None:
                mean, spread = (torch.tensor(self.config[f"latents_{name}"]) for name in ("mean", "std"))
            else:
                return None
            self._mean_std = mean, spread
        return self._laid_over(self._mean_std[0], like), self._laid_over(self._mean_std[1], like)

    def _laid_over(self, statistic: Tensor, like: Tensor) -> Tensor:
        """Shape a statistic for latents: (1, C, [1,] 1, 1), or (1, C, F, 1, 1) where each frame has its own."""
        frames = statistic.numel() // like.shape[1]
        shape = (1, like.shape[1], *((frames,) if like.ndim == 5 else ()), 1, 1)
        laid = statistic.to(like.device, torch.float32).view(shape)
        return laid[:, :, : like.shape[2]] if frames > 1 else laid


def decode(vae: Any, latents: Latents, value: Tensor) -> Tensor:
    """Decode latents, outside of autocast and in the VAE's own dtype. Shapes: (B, C, [F,] h, w) -> (B, 3, [F,] H, W), -1..1."""
    with torch.autocast(value.device.type, enabled=False):
        raw = latents.unscaled(value.float()).to(next(vae.parameters()).dtype)
        return vae.decode(raw, return_dict=False)[0].float()
