"""What the header of an export says: modelspec.* (Stability's ModelSpec 1.0.1) and kohya's ss_*, all as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from difftrain.contracts import RunFacts
from difftrain.models.parts.header import described, kohya_keys
from difftrain.models.sd3.architecture import Architecture, named
from difftrain.models.sd3.assembled import LIGHT

if TYPE_CHECKING:
    from difftrain.config.sections import TrainConfig

MEDIUM, OTHER = "stable-diffusion-v3-medium", "stable-diffusion-v3"  # ModelSpec knows the one by name
BASE_VERSION = "sd3"  # kohya's word


def header(
    cfg: TrainConfig, architecture: Architecture, title: str, saved_at: float, facts: RunFacts | None
) -> dict[str, str]:
    """Return everything for one export; without a run (a mere conversion) no ss_* keys.

    title: the folder's name where the configuration gives none. saved_at: Unix seconds.
    """
    native = architecture.transformer["sample_size"] * architecture.vae_factor
    first = next((each.resolution for each in cfg.data.datasets if each.resolution), None)
    width, height = cfg.data.resolution or first or (native, native)
    medium = architecture.transformer.items() >= named("medium").transformer.items()
    low, high = cfg.flow.min_t, cfg.flow.max_t
    own = {
        "architecture": MEDIUM if medium else OTHER,
        "resolution": f"{width}x{height}",
        "prediction_type": "velocity",
        "timestep_range": None if (low, high) == (0, 1) else f"{round(1000 * low)},{round(1000 * high)}",
    }
    found = described(cfg, title, saved_at, own)
    return found if facts is None else found | kohya_keys(cfg, facts, saved_at, BASE_VERSION, _of_the_objective(cfg))


def _of_the_objective(cfg: TrainConfig) -> dict[str, Any]:
    loss, flow, model = cfg.loss, cfg.flow, cfg.model
    dropped = model.uncond_text_dropout_prob if model.enable_uncond_text_dropout else None
    told = {
        "train_type": LIGHT if model.train_type == LIGHT else None,
        "loss_type": loss.type,
        "pseudo_huber_c": loss.pseudo_huber_c,
        "text_recon_gamma": loss.text_recon_gamma or None,
        "text_recon_target_layer": loss.text_recon_target_layer if loss.text_recon_gamma else None,
        "timestep_sample_method": flow.timestep_sample_method,
        "sigmoid_scale": flow.sigmoid_scale,
        "shift": flow.shift,
        "flux_shift": flow.flux_shift,
        "t5_max_length": model.t5_max_length,
        "t5_attention_mask": model.t5_attention_mask,
        "uncond_text_dropout_prob": dropped,
    }
    return {name: value for name, value in told.items() if value is not None}
