"""AdamW8bitKahan of diffusion-pipe: bitsandbytes' AdamW with state in 8 bits, each update bounded where it is asked for.

What "Kahan" means is the engine's here, of any optimizer: trained weights are fp32, or with master_weights = "kahan" bf16
with the 16 bits that bf16 lacks kept beside them, so that no update is lost (engine/half_precision.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from bitsandbytes import functional
from bitsandbytes.optim import AdamW8bit

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 256  # elements that have a scale of their own


class AdamW8bitKahan(AdamW8bit):  # type: ignore[misc]
    """Update as AdamW8bit. stabilize: at a rate of lr / max(1, RMS), RMS of a weight's gradient over the root of its average.

    Source: StableAdamW, Wortsman et al. 2023, arXiv:2304.13013, algorithm 2.
    """

    steps_apart = True  # each weight is updated from its own gradient and state alone

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        stabilize: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.stabilize = stabilize

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Update one weight."""
        if not self.stabilize:
            super().update_step(group, p, gindex, pindex)
            return
        assert p.grad is not None
        share = self._rms(p.grad.float(), self.state[p], group).clamp(min=1.0).reciprocal()
        # an update is its rate times what does not depend on it, so a share of it is one of the rate; the host waits for nothing
        before = p.detach().clone()
        super().update_step(group, p, gindex, pindex)
        p.copy_(torch.lerp(before, p.detach(), share.to(p.dtype)))

    def _rms(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return the RMS of g / sqrt(v), v the average of g^2 with this gradient in it, its bias corrected."""
        average = state["state2"]
        if average.dtype == torch.uint8:
            average = functional.dequantize_blockwise(
                average, absmax=state["absmax2"], code=state["qmap2"], blocksize=_BLOCK
            )
        decay, step = group["betas"][1], state["step"] + 1
        squares = gradient.square()
        v = average.float().lerp(squares, 1 - decay) / (1 - decay**step)
        return (squares / v.clamp(min=group["eps"] ** 2)).mean().sqrt()
