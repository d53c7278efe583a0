"""The velocity of a rectified flow: draws, inputs, and the loss of each sample."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from difftrain.contracts import METRIC, Batch, Bucket, DrawSpec, Inputs
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


# --- The denoiser of Karras et al. 2022 ("Elucidating the Design Space", table 1): preconditioned, over a log-normal sigma
# D(x, sigma) = c_skip x + c_out F(c_in x, c_noise) (equation 7), learnt from lambda |D - x0|^2 with lambda = 1 / c_out^2.
# That is the plain square of F - (x0 - c_skip x) / c_out (equation 8): F is trained on that target, and every sample
# weighs 1.


_NORMAL = statistics.NormalDist()
_EDGE = 2.0**-54


class Coefficients(NamedTuple):
    """Table 1, column "Ours". Shapes: (B, 1, ...) each, c_noise (B,)."""

    skip: Tensor
    out: Tensor
    enter: Tensor
    noise: Tensor


@dataclass(frozen=True)
class EdmSigma:
    """Map a uniform number to sigma = e^(mean + std N), in fp64 on the host. Growing; picklable."""

    mean: float = -1.2
    std: float = 1.2

    def __call__(self, u: float, bucket: Bucket) -> float:
        """Return the quantile u; it is the same at every size."""
        return math.exp(self.mean + self.std * _NORMAL.inv_cdf(min(max(u, _EDGE), 1.0 - 2.0 * _EDGE)))


@dataclass(frozen=True)
class Edm:
    """The objective for latents of deviation sigma_data."""

    sigma_data: float = 0.5
    sigma: EdmSigma = EdmSigma()

    def draws(self, latent: DrawSpec) -> dict[str, DrawSpec]:
        """Return the host draws: the noise, and the quantile of sigma."""
        return {"noise": latent, "timestep": DrawSpec("uniform", through=self.sigma)}

    def coefficients(self, sigma: Tensor, ndim: int) -> Coefficients:
        """Return how input, output and residual are scaled. Shapes: sigma (B,)."""
        s, data = sigma.view(-1, *(1,) * (ndim - 1)), self.sigma_data
        total = s.square() + data**2
        return Coefficients(data**2 / total, s * data / total.sqrt(), 1.0 / total.sqrt(), sigma.log() / 4.0)

    def inputs(self, batch: Batch, latents: Tensor, conditions: dict[str, Tensor]) -> Inputs:
        """Noise latents to x0 + sigma e, as the network takes them, with what it is to say of them (equation 8); all in fp32."""
        sigma, noise = batch.draws["timestep"].float(), batch.draws["noise"].float()
        c = self.coefficients(sigma, latents.ndim)
        x = latents + sigma.view(-1, *(1,) * (latents.ndim - 1)) * noise
        target = (latents - c.skip * x) / c.out
        weight = weight_of(batch, len(sigma), latents.device)
        return Inputs(c.enter * x, c.noise, conditions, target, weight, mask_of(batch, latents))

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """Return D from what the network says of x (equation 7)."""
        c = self.coefficients(sigma, x.ndim)
        return c.skip * x + c.out * output
