"""The noise schedule of SDXL as diffusers' schedulers take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from difftrain.diffusion.ddpm import BETA_END, BETA_START, STEPS


@dataclass(frozen=True)
class SchedulerConfig:
    """Say what the denoiser was trained to predict, and whether down to no signal at all; the rest is SDXL's."""

    prediction_type: str = "epsilon"
    zero_terminal_snr: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that diffusers' schedulers understand; those of zero terminal SNR only where asked for.

        With it the last timestep has no signal, and only "trailing" starts there: Lin et al. 2024, section 3.3.
        """
        shared = {
            "num_train_timesteps": STEPS,
            "beta_start": BETA_START,
            "beta_end": BETA_END,
            "beta_schedule": "scaled_linear",
            "prediction_type": self.prediction_type,
            "timestep_spacing": "leading",
            "steps_offset": 1,
        }
        if self.zero_terminal_snr:
            shared |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        return shared

    def make(self, name: str) -> Any:
        """Make a scheduler of diffusers by its class name."""
        import diffusers

        return getattr(diffusers, name)(**self.to_dict())
