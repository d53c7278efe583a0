"""The velocity of a rectified flow: draws, inputs, and the loss of each sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from difftrain.contracts import METRIC, Batch, DrawSpec, Inputs
from difftrain.diffusion import flow, losses
from difftrain.diffusion.flow import FLUX_MU, FLUX_TOKENS, FlowTime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from difftrain.config.schema.sections import FlowSection, LossSection
    from difftrain.models.facts import Shift


DENOISE, TEXT_RECON = "denoise", "text_recon"
FIRST_FRAME = "first_frame"  # draw: below the share, a clip's first frame is given
GIVEN_TIME = 1e-5  # of a frame that is given: almost without noise


def time_of(section: FlowSection, token: int, shift: Shift | None = None, frames: int = 0) -> FlowTime:
    """Return how a time is drawn. token: pixels along a token's side. frames: that a latent frame stands for."""
    dynamic = shift.dynamic if shift is not None and shift.dynamic else (*FLUX_TOKENS, *FLUX_MU)
    return FlowTime(
        method=section.timestep_sample_method,
        sigmoid_scale=section.sigmoid_scale,
        mode_scale=section.mode_scale,
        shift=section.shift,
        flux_shift=section.flux_shift,
        min_t=section.min_t,
        max_t=section.max_t,
        token=token,
        dynamic=dynamic,
        frames=frames,
        mu=shift.mu if shift is not None else None,
    )


def draws(latent: DrawSpec, time: FlowTime) -> dict[str, DrawSpec]:
    """Return the host draws of every flow: the noise, and the quantile of the time."""
    return {"noise": latent, "timestep": DrawSpec("uniform", through=time)}


def inputs(batch: Batch, latents: Tensor, conditions: dict[str, Tensor]) -> Inputs:
    """Noise latents to x_t = (1 - t) x0 + t e, whose velocity e - x0 is the target; all in fp32."""
    t, noise = batch.draws["timestep"].float(), batch.draws["noise"].float()
    return Inputs(
        x_t=flow.add_noise(latents, noise, t),
        timestep=flow.SCALE * t,
        conditions=conditions,
        target=flow.target(latents, noise),
        weight=weight_of(batch, len(t), latents.device),
        mask=mask_of(batch, latents),
    )


def with_first_frame(made: Inputs, batch: Batch, latents: Tensor, share: float) -> Inputs:
    """Give a share of the clips their first frame: almost without noise, at a time of its own, and without a loss.

    Pictures stay as they are, and so do clips that are evaluated, which have no such draw.
    """
    if FIRST_FRAME not in batch.draws or latents.ndim == 4 or latents.shape[2] == 1:
        return made
    frames = latents.shape[2]
    is_given = torch.zeros((len(latents), frames), dtype=torch.bool, device=latents.device)
    is_given[:, 0] = batch.draws[FIRST_FRAME] < share
    t = torch.where(is_given, GIVEN_TIME, batch.draws["timestep"].float()[:, None])
    learnt = (~is_given).float()[:, None, :, None, None].expand(-1, -1, -1, *latents.shape[-2:])
    return replace(
        made,
        x_t=flow.add_noise(latents, batch.draws["noise"].float(), t),
        timestep=flow.SCALE * t,
        mask=learnt if made.mask is None else learnt * made.mask,
    )


def weight_of(batch: Batch, samples: int, device: torch.device) -> Tensor:
    """Return the weight of each sample's loss by the source that it comes from, (B,) fp32."""
    weight = batch.features.get("loss_weight")
    return torch.ones(samples, device=device) if weight is None else weight


def mask_of(batch: Batch, latents: Tensor) -> Tensor | None:
    """Return the mask of the loss at the latents' size, where there is one: (B, 1, [F,] h, w), of a clip alike in every frame."""
    if batch.loss_mask is None:
        return None
    height, width = latents.shape[-2:]
    # nearest, so that a mask stays what it is and no cell counts in part
    mask = losses.mask_nearest(batch.loss_mask, (height, width))
    return mask if latents.ndim == 4 else mask.unsqueeze(2).expand(-1, -1, latents.shape[2], -1, -1)


def sample_losses(section: LossSection, prediction: Tensor, inputs: Inputs) -> Tensor:
    """Return the loss of each sample's velocity, not weighed yet, (B,) fp32."""
    fixed = losses.fixed_threshold(section)
    samples = len(inputs.weight)
    c = None if fixed is None else torch.full((samples,), fixed, device=prediction.device)
    error = losses.elementwise(prediction.float(), inputs.target.float(), section.type, c)
    return losses.per_sample(error, inputs.mask, section.mask_mean)


def loss_sums(section: LossSection, prediction: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """Sum the loss over the samples, in fp32; beside it the same as what is measured."""
    total = (inputs.weight * sample_losses(section, prediction, inputs)).sum()
    return {"loss": total, f"{METRIC}{DENOISE}_loss": total}


def with_text(
    section: LossSection, sums: dict[str, Tensor], last: Tensor, target: Tensor, inputs: Inputs
) -> dict[str, Tensor]:
    """Add the term of reconstructed text; beside it what it is by itself, not weighed by gamma. Shapes: (B, L, D) both."""
    recon = (inputs.weight * (last.float() - target.float()).square().flatten(1).mean(1)).sum()
    terms = {DENOISE: sums["loss"], TEXT_RECON: section.text_recon_gamma * recon}
    measured = {name: value for name, value in sums.items() if name != "loss"}
    return {**terms, **measured, f"{METRIC}{TEXT_RECON}_loss": recon}


def scheduler_config(section: FlowSection, shift: Shift, stored: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of FlowMatchEulerDiscreteScheduler: sampling shifts its times as training does.

    Where training says nothing of it, as the sampler that came with the weights, else as the family's own.
    """
    if section.shift is not None:
        return {"num_train_timesteps": 1000, "shift": section.shift}
    dynamic = shift.dynamic or (*FLUX_TOKENS, *FLUX_MU)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    follows = {"use_dynamic_shifting": True, **dict(zip(names, dynamic, strict=True))}
    if shift.terminal is not None:
        follows["shift_terminal"] = shift.terminal
    if section.flux_shift:
        return {"num_train_timesteps": 1000, **follows}
    if "shift" in stored or stored.get("use_dynamic_shifting"):
        return {key: value for key, value in stored.items() if not key.startswith("_")}
    return {"num_train_timesteps": 1000, "shift": shift.s, **(follows if shift.dynamic else {})}


# --- A network that is preconditioned as in Karras et al. 2022 ("Elucidating the Design Space", table 1, column "Ours")
# Their x = x0 + sigma e is x_t / (1 - t) with t = sigma / (1 + sigma): what D = c_skip x + c_out F (equation 7) says of x0 is
# a velocity. With d the deviation of the latents and r^2 = t^2 + d^2 (1 - t)^2,
#   c_in x = x_t / r,   c_noise = ln(t / (1 - t)) / 4,   v = (x_t - D) / t = x_t (t - d^2 (1 - t)) / r^2 - F d / r.
# Their loss, lambda |D - x0|^2 with lambda = 1 / c_out^2, is (r / d)^2 |v - v*|^2; their log-normal sigma is a logit-normal t.


_EDGE = 1e-6  # of times that have a logarithm


@dataclass(frozen=True)
class Preconditioning:
    """What stands around such a network in a flow. sigma_data: the deviation of latents. Times are in 0..1, (B,)."""

    sigma_data: float

    def level(self, t: Tensor) -> Tensor:
        """Return what the network is told of the noise, (B,)."""
        t = t.clamp(_EDGE, 1 - _EDGE)
        return (t / (1 - t)).log() / 4.0

    def entering(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Return what the network is given of x_t."""
        return x_t / self._radius(_over(t, x_t))

    def velocity(self, x_t: Tensor, t: Tensor, output: Tensor) -> Tensor:
        """Return the velocity that the network's output says."""
        t, d = _over(t, x_t), self.sigma_data
        r = self._radius(t)
        return x_t * ((t - d**2 * (1 - t)) / r.square()) - output * (d / r)

    def weight(self, t: Tensor) -> Tensor:
        """Return what a sample's square error of the velocity counts for, (B,)."""
        return (self._radius(t) / self.sigma_data).square()

    def _radius(self, t: Tensor) -> Tensor:
        return (t.square() + self.sigma_data**2 * (1 - t).square()).sqrt()


def _over(t: Tensor, x: Tensor) -> Tensor:
    return t.view(-1, *(1,) * (x.ndim - 1))
