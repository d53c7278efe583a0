"""The noise schedule of SDXL as diffusers' schedulers take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from difftrain.diffusion.ddpm import BETA_END, BETA_START, STEPS


@dataclass(frozen=True)
class SchedulerConfig:
    """Say what the denoiser was trained to predict; the rest is SDXL's."""

    prediction_type: str = "epsilon"

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that every diffusers scheduler understands."""
        return {
            "num_train_timesteps": STEPS,
            "beta_start": BETA_START,
            "beta_end": BETA_END,
            "beta_schedule": "scaled_linear",
            "prediction_type": self.prediction_type,
            "timestep_spacing": "leading",
            "steps_offset": 1,
        }

    def make(self, name: str) -> Any:
        """Make a scheduler of diffusers by its class name."""
        import diffusers

        return getattr(diffusers, name)(**self.to_dict())
