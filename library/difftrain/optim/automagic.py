"""Automagic: a rate for every single weight, which goes up while its gradient keeps its sign and down where that changes.

Source: the method of Ostris' ai-toolkit, described by its behaviour; the second moments are Adafactor's (Shazeer and Stern
2018, section 4), clipping its section 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from difftrain.optim.making import OptimizerOrder, WeightwiseOptimizer, construct

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 32767  # of 16 bits with a sign


def make(order: OptimizerOrder) -> Optimizer:
    """Make it."""
    return construct(order, Automagic)


class Automagic(WeightwiseOptimizer):
    """Update weights by rates of their own.

    lr: of all weights at the beginning; a schedule multiplies all rates by what it makes of this one. lr_bump: by how much a
    rate goes up or down in a step, within min_lr and max_lr. A rate takes two bytes, as a multiple of a small part of
    lr_bump, with the sign of the last gradient as its own: in 8 bits a bump would be lost in rounding.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-6,
        min_lr: float = 1e-7,
        max_lr: float = 1e-3,
        lr_bump: float = 1e-6,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 < min_lr <= max_lr or not 0 < lr_bump <= max_lr:
            raise ValueError(
                f"rates must be 0 < min_lr <= max_lr and 0 < lr_bump <= max_lr, got {min_lr}, {max_lr}, {lr_bump}"
            )
        if lr_bump * _LARGEST < max_lr or min_lr * _LARGEST < max_lr:
            raise ValueError(
                f"lr_bump and min_lr must be at least max_lr / {_LARGEST}, got {lr_bump}, {min_lr}, {max_lr}"
            )
        if not 0 <= beta2 < 1 or clip_threshold <= 0 or weight_decay < 0:
            raise ValueError("beta2 must be in [0, 1), clip_threshold above 0, and weight_decay not negative")
        defaults = {
            "lr": lr, "min_lr": min_lr, "max_lr": max_lr, "lr_bump": lr_bump, "eps": eps,
            "clip_threshold": clip_threshold, "beta2": beta2, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def update_weight(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Update one weight that has a gradient."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        gradient = gradient.float()

        # --- a direction of about unit size: the gradient over the root of its average square, clipped
        direction = gradient * inverse_root(state, gradient, group["beta2"], group["eps"][0])
        direction /= (direction.square().mean().sqrt() / group["clip_threshold"]).clamp(min=1.0)

        # --- rates, in units
        unit = group["lr_bump"] / int(group["lr_bump"] * _LARGEST / group["max_lr"])
        low, high, bump = (round(group[name] / unit) for name in ("min_lr", "max_lr", "lr_bump"))
        positive = direction > 0
        if "rate" in state:
            agrees = (state["rate"] > 0) == positive
            rate = (state["rate"].abs().int() + torch.where(agrees, bump, -bump)).clamp_(max(1, low), high)
        else:
            start = round(group.get("initial_lr", group["lr"]) / unit)
            rate = torch.full_like(gradient, min(max(1, low, start), high), dtype=torch.int32)
        state["rate"] = torch.where(positive, rate, -rate).to(torch.int16)

        # --- the update, scaled by what the schedule makes of the rate at the beginning
        beginning = group.get("initial_lr", group["lr"])
        own = rate.float().mul_(unit * (group["lr"] / beginning if beginning else 1.0))
        change = direction.mul_(own)
        if group["weight_decay"]:
            change += weight.float() * own * group["weight_decay"]
        weight.sub_(change.to(weight.dtype))


def inverse_root(state: dict[str, Any], gradient: Tensor, beta2: float, eps: float) -> Tensor:
    """Return 1 / sqrt of the average of squared gradients, of matrices from averages of rows and of columns (Adafactor)."""
    squares = gradient.square().add_(eps)
    if gradient.ndim < 2:
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(squares)
        return state["exp_avg_sq"].lerp_(squares, 1 - beta2).rsqrt()
    if "exp_avg_sq_row" not in state:
        state["exp_avg_sq_row"] = torch.zeros_like(squares[..., 0])
        state["exp_avg_sq_col"] = torch.zeros_like(squares[..., 0, :])
    rows = state["exp_avg_sq_row"].lerp_(squares.mean(-1), 1 - beta2)
    columns = state["exp_avg_sq_col"].lerp_(squares.mean(-2), 1 - beta2)
    return (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)
