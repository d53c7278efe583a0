"""Samplers by kohya's names, made from diffusers' schedulers with the model's own noise schedule."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.diffusion.ddpm import almost_zero_snr

# name -> class of diffusers, arguments beside the noise schedule
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    # kohya clips x_0 to [-1, 1] with DDIM, which is right for pixels; latents of unit variance go beyond it
    "ddim": ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False}),
    "pndm": ("PNDMScheduler", {"set_alpha_to_one": False}),
    "lms": ("LMSDiscreteScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm_2": ("KDPM2DiscreteScheduler", {}),
    "dpm_2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    # the first-order formula ends at the smallest sigma: diffusers does not take it to zero
    "dpmsolver": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmsingle": ("DPMSolverSinglestepScheduler", {"lower_order_final": True}),
    "k_lms": ("LMSDiscreteScheduler", {}),
    "k_euler": ("EulerDiscreteScheduler", {}),
    "k_euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "k_dpm_2": ("KDPM2DiscreteScheduler", {}),
    "k_dpm_2_a": ("KDPM2AncestralDiscreteScheduler", {}),
}
_SHARED = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "prediction_type",
    "timestep_spacing",
    "steps_offset",
    "rescale_betas_zero_snr",
)


def sampler_fault(name: str) -> str | None:
    """Say why a sampler cannot be used here; None where it can. Imports nothing."""
    if name not in SAMPLERS:
        return f"there is no sampler {name!r}; one of {', '.join(SAMPLERS)}"
    if SAMPLERS[name][0] == "LMSDiscreteScheduler" and importlib.util.find_spec("scipy") is None:
        return f"{name} needs the package scipy, which is not installed (pip install scipy, or choose another sampler)"
    return None


def make_sampler(name: str, config: Mapping[str, Any]) -> Any:
    """Make a sampler from the configuration of a pipeline's scheduler. Raises ConfigFault where it cannot be used."""
    fault = sampler_fault(name)
    if fault:
        raise ConfigFault([Fault("--sample_sampler", fault)])
    import diffusers

    class_name, extra = SAMPLERS[name]
    made_from = getattr(diffusers, class_name)
    known = inspect.signature(made_from.__init__).parameters
    shared = {key: config[key] for key in _SHARED if key in config and key in known}
    if config.get("rescale_betas_zero_snr") and "rescale_betas_zero_snr" not in known:
        shared["trained_betas"] = almost_zero_snr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "dpmsolver" will go one day; kohya's users have it
        return made_from(**shared, **extra)
