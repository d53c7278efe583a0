"""Samplers by kohya's names, made from diffusers' schedulers with the model's own noise schedule."""

from __future__ import annotations

import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import ConfigFault, Fault
from difftrain.diffusion.ddpm import almost_zero_snr

if TYPE_CHECKING:
    from torch import Tensor

Mu = Callable[[int, int], float]  # (image tokens, steps) -> the logarithm of the shift
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
# of models that learn a rectified flow: the times that these walk through are shifted as the model's own scheduler says
FLOW_SAMPLERS: dict[str, str] = {
    "flow_euler": "FlowMatchEulerDiscreteScheduler",
    "flow_heun": "FlowMatchHeunDiscreteScheduler",
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


def sampler_fault(name: str, *, flow: bool | None = None) -> str | None:
    """Say why a sampler cannot be used here; None where it can. Imports nothing.

    flow: whether the model learns a flow; None: not known yet.
    """
    known = {None: (*SAMPLERS, *FLOW_SAMPLERS), True: (*FLOW_SAMPLERS,), False: (*SAMPLERS,)}[flow]
    if name not in known:
        is_known = name in SAMPLERS or name in FLOW_SAMPLERS
        learns = "learns a flow" if flow else "learns no flow"
        what = f"{name} is not a sampler for a model that {learns}" if is_known else f"no such sampler: {name!r}"
        return f"{what}; one of {', '.join(known)}"
    if SAMPLERS.get(name, ("",))[0] == "LMSDiscreteScheduler" and importlib.util.find_spec("scipy") is None:
        return f"{name} needs the package scipy, which is not installed (pip install scipy, or choose another sampler)"
    return None


def make_sampler(
    name: str, config: Mapping[str, Any], tokens: int | None = None, *, shift: float | None = None, mu: Mu | None = None
) -> Any:
    """Make a sampler from the configuration of a model's own scheduler. Raises ConfigFault where it cannot be used.

    tokens: of the picture, where the shift of a flow's times follows it. shift: of a flow's times, in place of the
    model's own. mu: how a shift that follows the size also follows the number of steps, where it does.
    """
    flow = is_flow(config)
    fault = sampler_fault(name, flow=flow)
    if fault:
        raise ConfigFault([Fault("sampler", fault)])
    return _flow_sampler(name, config, tokens, shift, mu) if flow else _sampler(name, config)


def _sampler(name: str, config: Mapping[str, Any]) -> Any:
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


def is_flow(config: Mapping[str, Any]) -> bool:
    """Tell from its scheduler whether a model learns a flow: it has shifts or a deviation of the data in place of betas."""
    return ("shift" in config or "sigma_data" in config) and "beta_schedule" not in config


def _flow_sampler(
    name: str, config: Mapping[str, Any], tokens: int | None, shift: float | None, by_steps: Mu | None
) -> Any:
    """Make a flow's sampler that walks the times of the model's own scheduler: where they follow the size, this one's."""
    import diffusers

    if shift is None and "sigma_max" in config and (config.get("use_karras_sigmas") or "sigma_data" in config):
        return KarrasLevels(config, heun=name == "flow_heun")
    made_from, count = getattr(diffusers, FLOW_SAMPLERS[name]), config["num_train_timesteps"]
    if shift is not None or not config.get("use_dynamic_shifting"):
        return made_from(num_train_timesteps=count, shift=config["shift"] if shift is None else shift)
    low, high = config["base_image_seq_len"], config["max_image_seq_len"]
    rise = (config["max_shift"] - config["base_shift"]) / (high - low)
    mu = config["base_shift"] + rise * ((tokens or low) - low)
    if "use_dynamic_shifting" in inspect.signature(made_from.__init__).parameters:
        sampler = made_from.from_config(config)
        sampler.set_timesteps = partial(sampler.set_timesteps, mu=mu)
        if by_steps is not None:
            sampler.set_timesteps = _with_mu(sampler.set_timesteps, partial(by_steps, tokens or low))
        return sampler
    sampler = made_from(num_train_timesteps=count, shift=math.exp(mu))
    sampler.sigma_min = 1 / count  # the last time before it is shifted, which is done to it where steps are chosen
    if by_steps is not None:
        set_times = sampler.set_timesteps

        def set_timesteps(steps: int, device: Any = None) -> None:
            sampler.register_to_config(shift=math.exp(by_steps(tokens or low, steps)))
            set_times(steps, device)

        sampler.set_timesteps = set_timesteps
    return sampler


def _with_mu(set_timesteps: Callable[..., None], mu: Callable[[int], float]) -> Callable[..., None]:
    """Let a sampler's times follow the number of steps."""

    def by_steps(steps: int | None = None, *, sigmas: Sequence[float] | None = None, **options: Any) -> None:
        count = steps if sigmas is None else len(sigmas)
        assert count is not None, "a walk has steps or sigmas"
        set_timesteps(steps, sigmas=sigmas, **{**options, "mu": mu(count)})

    return by_steps


# --- A flow whose pipeline walks as in Karras et al. 2022, "Elucidating the Design Space": x = x0 + sigma e from sigma_max down
# With t = sigma / (1 + sigma) what the denoiser takes, x / (1 + sigma), is x_t = (1 - t) x0 + t e; its velocity v says x0 = x_t - t v.


RHO = 7.0  # of equation 5


class KarrasLevels:
    """Euler's steps, or Heun's (algorithm 1), from one level of noise to the next.

    The last level is looked at and not left, as in pipelines of diffusers: n steps move n - 1 times. Where the
    configuration says that the last one is zero, it is left for the picture.
    """

    def __init__(self, config: Mapping[str, Any], *, heun: bool = False) -> None:
        self.config, self.order = config, 2 if heun else 1
        self.init_noise_sigma = float(config["sigma_max"])
        self._before: tuple[Tensor, Tensor] | None = None  # Heun: where a step began, and its slope
        self._number = 0

    def set_timesteps(self, steps: int, device: Any = None) -> None:
        """Lay levels by equation 5, and the times at which the denoiser is asked: by Heun twice for each step."""
        low, high = (float(self.config[name]) ** (1 / RHO) for name in ("sigma_min", "sigma_max"))
        levels = (high + torch.linspace(0, 1, steps, dtype=torch.float64) * (low - high)) ** RHO
        last = torch.zeros(1) if self.config.get("final_sigmas_type") == "zero" else levels[-1:]
        self.sigmas = torch.cat((levels, last)).float()
        asked = (torch.arange(self.order * (steps - 1) + 1) + self.order - 1) // self.order
        sigmas = self.sigmas[asked]
        self.timesteps = (sigmas / (sigmas + 1) * self.config["num_train_timesteps"]).to(device)
        self.set_begin_index(0)

    def set_begin_index(self, number: int) -> None:
        """Begin at one of the times."""
        self._number, self._before = number, None

    @property
    def _level(self) -> int:
        """The level that the denoiser is asked at: Heun's second question is at the next one."""
        return (self._number + self.order - 1) // self.order

    def scale_model_input(self, x: Tensor, t: Tensor) -> Tensor:
        """Return x_t."""
        return x * (1 - self._t(self._level))

    def scale_noise(self, latents: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """Return latents at the level of a time, (1,)."""
        t = (times / self.config["num_train_timesteps"]).to(latents.device)
        return latents + t / (1 - t) * noise

    def step(self, velocity: Tensor, t: Tensor, x: Tensor, *, return_dict: bool = False) -> tuple[Tensor]:
        """Go to the next level. Shapes: x (B, C, [F,] h, w)."""
        level, following = self._level, self._level + 1
        time = self._t(level)
        slope = (x - ((1 - time) * x - time * velocity)) / self.sigmas[level]
        self._number += 1
        if self._before is not None:  # Heun's second slope, of the step that ends at this level
            (x, first), self._before = self._before, None
            return (x + (self.sigmas[level] - self.sigmas[level - 1]) * (first + slope) / 2,)
        if self.order == 2 and following < len(self.sigmas) - 1:
            self._before = x, slope
        return (x + (self.sigmas[following] - self.sigmas[level]) * slope,)

    def _t(self, level: int) -> Tensor:
        """Return the time of a level; on the host, as a number that no device waits for."""
        return self.sigmas[level] / (self.sigmas[level] + 1)
