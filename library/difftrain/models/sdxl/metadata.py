"""What the header of an export says: modelspec.* (Stability's ModelSpec 1.0.1) and kohya's ss_*, all as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from difftrain.contracts import RunFacts
from difftrain.diffusion.ddpm import STEPS
from difftrain.models.parts.header import described, kohya_keys
from difftrain.models.sdxl.architecture import Architecture

if TYPE_CHECKING:
    from difftrain.config.sections import TrainConfig

BASE_VERSION = "sdxl_base_v1-0"


def header(
    cfg: TrainConfig, architecture: Architecture, title: str, saved_at: float, facts: RunFacts | None
) -> dict[str, str]:
    """Return everything for one export; without a run (a mere conversion) no ss_* keys.

    title: the file's name where --metadata_title gives none. saved_at: Unix seconds.
    """
    found = modelspec(cfg, architecture, title, saved_at)
    return found if facts is None else found | kohya_keys(cfg, facts, saved_at, BASE_VERSION, _of_the_objective(cfg))


def modelspec(cfg: TrainConfig, architecture: Architecture, title: str, saved_at: float) -> dict[str, str]:
    """Describe the model. The date is local time to the second, as kohya writes it."""
    native = architecture.unet.get("sample_size", 128) * architecture.vae_factor
    width, height = cfg.data.resolution or (native, native)
    values = {
        "architecture": "stable-diffusion-xl-v1-base",
        "resolution": f"{width}x{height}",
        "prediction_type": "v" if cfg.model.prediction_type == "v_prediction" else "epsilon",
        "encoder_layer": str(cfg.model.clip_skip) if cfg.model.clip_skip else None,
        "timestep_range": _timestep_range(cfg),
    }
    return described(cfg, title, saved_at, values)


def _timestep_range(cfg: TrainConfig) -> str | None:
    """Write [min, max) of a model that is trained on a part of the noise levels only."""
    low, high = cfg.noise.min_timestep, cfg.noise.max_timestep
    return None if low is None and high is None else f"{low or 0},{STEPS if high is None else high}"


def _of_the_objective(cfg: TrainConfig) -> dict[str, Any]:
    loss, noise = cfg.loss, cfg.noise
    return {
        "loss_type": loss.type,
        "huber_schedule": loss.huber_schedule,
        "huber_c": loss.huber_c,
        "huber_scale": loss.huber_scale,
        "min_snr_gamma": loss.min_snr_gamma,
        "debiased_estimation": loss.debiased_estimation,
        "noise_offset": noise.offset,
        "noise_offset_random_strength": noise.offset_random_strength,
        "adaptive_noise_scale": noise.adaptive_scale,
        "multires_noise_iterations": noise.multires_iterations,
        "multires_noise_discount": noise.multires_discount,
        "ip_noise_gamma": noise.ip_gamma,
        "ip_noise_gamma_random_strength": noise.ip_gamma_random_strength,
        "zero_terminal_snr": noise.zero_terminal_snr,
    }
