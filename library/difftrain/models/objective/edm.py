"""The denoiser of Karras et al. 2022 ("Elucidating the Design Space", table 1): preconditioned, over a log-normal sigma.

D(x, sigma) = c_skip x + c_out F(c_in x, c_noise), learnt from lambda |D - x0|^2 with lambda = 1 / c_out^2. That is the
plain square of F - (x0 - c_skip x) / c_out: F is trained on that target, and every sample weighs 1.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from difftrain.contracts import Batch, Bucket, DrawSpec, Inputs
from difftrain.models.objective.flow import mask_of, weight_of

if TYPE_CHECKING:
    from torch import Tensor

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
        """Noise latents to x0 + sigma e, as the network takes them, with what it is to say of them; all in fp32."""
        sigma, noise = batch.draws["timestep"].float(), batch.draws["noise"].float()
        c = self.coefficients(sigma, latents.ndim)
        x = latents + sigma.view(-1, *(1,) * (latents.ndim - 1)) * noise
        target = (latents - c.skip * x) / c.out
        weight = weight_of(batch, len(sigma), latents.device)
        return Inputs(c.enter * x, c.noise, conditions, target, weight, mask_of(batch, latents))

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
        """Return D from what the network says of x."""
        c = self.coefficients(sigma, x.ndim)
        return c.skip * x + c.out * output
