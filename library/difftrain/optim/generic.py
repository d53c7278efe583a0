"""GenericOptim of diffusion-pipe: AdamW whose momentum, second moment and state may each be made smaller, or Muon for matrices.

What is a matrix is said by optim/muon.py: a weight of two dimensions within a numbered block. All other weights get AdamW.

Source: subspace momentum and subset norms, Nguyen and Nguyen 2024, arXiv:2411.07120, algorithms 1 and 2; factored second
moments, Shazeer and Stern 2018, section 3; Muon, Jordan et al. 2024, at AdamW's size as in Liu et al. 2025; AdaMuon, Si et
al. 2025, arXiv:2507.11005, algorithm 1; NorMuon, Li et al. 2025, arXiv:2510.05491, algorithm 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from difftrain.optim import eight_bits
from difftrain.optim.making import OptimizerOrder, WeightwiseOptimizer, construct
from difftrain.optim.muon import cut_matrices, orthogonalised

if TYPE_CHECKING:
    from torch import Tensor

MOMENTA, SECOND_MOMENTS = ("ema", "sm", "none"), ("ema", "sn", "factored", "none")
HEURISTICS = "heuristics"
_STEPS, _LEAST_SIDE = 5, 32  # of Newton and Schulz' iteration; matrices with a shorter side are not worth it


def make(order: OptimizerOrder) -> Optimizer:
    """Make it, each group cut in two: matrices, and other weights."""
    tables = [table for group in order.groups for table in cut_matrices(group)]
    return construct(OptimizerOrder(order.name, tables, order.lr, order.arguments), GenericOptim)


class GenericOptim(WeightwiseOptimizer):
    """Update weights along a momentum, divided by the root of a second moment.

    params: tables with "matrix". betas: of both averages; the second may be 1, which adds up as AdaGrad does.
    momentum_type: ema; sm, of matrices in the subspace of rank `rank` that holds most of the gradient at every
    update_proj_gap-th step, the rest of the gradient without momentum; none.
    second_moment_type: ema; sn, of matrices one number for each subset of subset_size elements (negative: for sqrt(elements) /
    -subset_size of them; heuristics: for each row or column), the mean of squares with correct_dim, else their sum;
    factored, of matrices a number for each row and column; none.
    muon: matrices go along the orthogonalised momentum; adamuon: divided by the root of its own second moment, at the same
    root mean square; normuon: divided so line by line of the longer side, at the same norm. state_bits: 8 keeps averages in 8
    bits. cpu_offload: those of weights of two dimensions and more lie on the host, and come for the update.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        momentum_type: str = "ema",
        second_moment_type: str = "ema",
        rank: int | None = None,
        proj_type: str = "svd",
        update_proj_gap: int = 200,
        subset_size: Any = None,
        correct_dim: bool = False,
        muon: bool = False,
        adamuon: bool = False,
        normuon: bool = False,
        cpu_offload: bool = False,
        state_bits: int = 32,
    ) -> None:
        self.momentum_type, self.second_moment_type = momentum_type, second_moment_type
        self.rank, self.gap, self.subset_size, self.correct_dim = rank, update_proj_gap, subset_size, correct_dim
        self.correct_bias, self.eight_bit, self.cpu_offload = correct_bias, state_bits == 8, cpu_offload
        ways = [name for name, chosen in (("muon", muon), ("adamuon", adamuon), ("normuon", normuon)) if chosen]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} contradict each other: each is a way to update matrices")
        self.orthogonal = ways[0] if ways else ""
        self._waits = False  # whether the averages of the weight that is updated go back to the host
        self._check(betas, eps, weight_decay, proj_type, state_bits)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _check(self, betas: tuple[float, float], eps: float, weight_decay: float, proj_type: str, bits: int) -> None:
        if not 0 <= betas[0] < 1 or not 0 <= betas[1] <= 1 or eps < 0 or weight_decay < 0:
            raise ValueError("betas must be in [0, 1) and [0, 1], eps and weight_decay not negative")
        if self.momentum_type not in MOMENTA or self.second_moment_type not in SECOND_MOMENTS:
            raise ValueError(
                f"momentum_type is one of {', '.join(MOMENTA)}, second_moment_type of {', '.join(SECOND_MOMENTS)}"
            )
        if (self.momentum_type == "sm") != (self.rank is not None) or (self.rank is not None and self.rank < 1):
            raise ValueError("momentum_type='sm' and rank, from 1 up, belong together")
        if proj_type != "svd":
            raise ValueError(f"proj_type is svd, got {proj_type!r}")
        if not isinstance(self.gap, int) or self.gap < 1:
            raise ValueError(f"update_proj_gap is a number of steps from 1 up, got {self.gap}")
        size = self.subset_size
        if (self.second_moment_type == "sn") != (size is not None):
            raise ValueError("second_moment_type='sn' and subset_size belong together")
        if size is not None and size != HEURISTICS and not (isinstance(size, int) and size):
            raise ValueError(f"subset_size is a whole number other than 0, or {HEURISTICS!r}, got {size!r}")
        if bits not in (8, 32):
            raise ValueError(f"state_bits is 32 or 8, got {bits}")

    def update_weight(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Update one weight that has a gradient."""
        state, matrix = self.state[weight], group["matrix"]
        assert weight.grad is not None
        self._waits = self.cpu_offload and weight.ndim > 1
        gradient, rate = weight.grad.float(), group["lr"]
        (beta1, beta2), step = group["betas"], state.get("step", 0) + 1
        state["step"] = step
        direction = self._momentum(state, gradient, beta1, matrix)
        weight.mul_(1 - rate * group["weight_decay"])
        if self.orthogonal and matrix and min(weight.shape) >= _LEAST_SIDE:
            direction = self._evened(state, orthogonalised(direction, _STEPS).float(), beta2, group["eps"])
            weight.add_(direction.to(weight.dtype), alpha=-rate * 0.2 * math.sqrt(max(weight.shape)))
            return
        if (root := self._root(state, gradient, beta2, matrix)) is not None:
            direction = direction / (root + group["eps"])
            if self.correct_bias and beta2 < 1:
                rate *= math.sqrt(1 - beta2**step)
        if self.correct_bias and self.momentum_type != "none":
            rate /= 1 - beta1**step
        weight.add_(direction.view(weight.shape).to(weight.dtype), alpha=-rate)

    def _evened(self, state: dict[str, Any], direction: Tensor, beta2: float, eps: float) -> Tensor:
        """Return an orthogonalised momentum whose elements, or lines, are nearer to one size; its norm stays that of Muon's.

        AdaMuon takes the root mean square 0.2 / sqrt(the longer side), which is that of a matrix of singular values 1.
        """
        if self.orthogonal == "muon":
            return direction
        share = 1 - beta2 if beta2 < 1 else 1.0
        if self.orthogonal == "adamuon":
            root = self._root(state, direction, beta2, True)
            evened = direction if root is None else direction / (root + eps)
            size = direction.new_tensor(min(direction.shape)).sqrt()
        else:
            across = 1 if direction.shape[0] >= direction.shape[1] else 0
            lines = self._averaged(state, "exp_avg_sq", direction.square().mean(across, keepdim=True), beta2, share)
            evened, size = direction / (lines.sqrt() + eps), direction.norm()
        return evened * (size / evened.norm().clamp(min=torch.finfo(torch.float32).tiny))

    # --- the two moments

    def _momentum(self, state: dict[str, Any], gradient: Tensor, beta1: float, matrix: bool) -> Tensor:
        if self.momentum_type == "none":
            return gradient
        if self.momentum_type == "ema" or not matrix or min(gradient.shape) <= (self.rank or 0):
            average = self._load(state, "exp_avg", gradient, signed=True).lerp_(gradient, 1 - beta1)
            self._keep(state, "exp_avg", average, signed=True)
            return average
        # m <- beta1 m + (1 - beta1) P^T g, and the update goes along P m + (g - P P^T g)
        if state["step"] % self.gap == 1 % self.gap:
            state["basis"] = subspace(gradient, self.rank or 1)
            state.pop("exp_avg", None)
        basis, tall = state["basis"].to(gradient.device), gradient.shape[0] >= gradient.shape[1]
        low = gradient @ basis if tall else basis.T @ gradient
        average = self._load(state, "exp_avg", low, signed=True).lerp_(low, 1 - beta1)
        self._keep(state, "exp_avg", average, signed=True)
        inside = average - low
        return gradient + (inside @ basis.T if tall else basis @ inside)

    def _root(self, state: dict[str, Any], gradient: Tensor, beta2: float, matrix: bool) -> Tensor | None:
        """Return the root of the second moment, of the gradient's shape or one that spreads over it."""
        kind = self.second_moment_type if matrix else "ema" if self.second_moment_type != "none" else "none"
        squares, share = gradient.square(), 1 - beta2 if beta2 < 1 else 1.0
        if kind == "none":
            return None
        if kind == "factored":
            rows = self._averaged(state, "exp_avg_sq_row", squares.mean(-1), beta2, share)
            columns = self._averaged(state, "exp_avg_sq_col", squares.mean(-2), beta2, share)
            mean = rows.mean().clamp(min=torch.finfo(torch.float32).tiny)
            return torch.outer(rows / mean, columns).sqrt_()
        if kind == "sn":
            return self._subset_root(state, squares, beta2, share)
        return self._averaged(state, "exp_avg_sq", squares, beta2, share).sqrt()

    def _subset_root(self, state: dict[str, Any], squares: Tensor, beta2: float, share: float) -> Tensor:
        reduce = torch.mean if self.correct_dim else torch.sum
        if self.subset_size == HEURISTICS:  # a number for each line of the longer side
            made = reduce(squares, dim=1 if squares.shape[0] >= squares.shape[1] else 0, keepdim=True)
            return self._averaged(state, "exp_avg_sq", made, beta2, share).sqrt()
        size = subset_of(squares.numel(), self.subset_size)
        made = self._averaged(state, "exp_avg_sq", reduce(squares.reshape(-1, size), dim=1), beta2, share)
        return made.sqrt().unsqueeze(1).expand(-1, size).reshape(squares.shape)

    # --- state

    def _averaged(self, state: dict[str, Any], name: str, value: Tensor, beta2: float, share: float) -> Tensor:
        average = self._load(state, name, value, signed=False)
        average = average.mul_(beta2 if beta2 < 1 else 1.0).add_(value, alpha=share)
        self._keep(state, name, average, signed=False)
        return average

    def _load(self, state: dict[str, Any], name: str, like: Tensor, *, signed: bool) -> Tensor:
        for key in (name, f"{name}_scale"):
            if key in state and state[key].device != like.device:
                state[key] = state[key].to(like.device)
        return eight_bits.load(state, name, like, signed=signed)

    def _keep(self, state: dict[str, Any], name: str, value: Tensor, *, signed: bool) -> None:
        if self.eight_bit:
            eight_bits.keep(state, name, value, signed=signed)
        else:
            state[name] = value
        if self._waits:
            for key in (name, f"{name}_scale", "basis"):
                if key in state:
                    state[key] = state[key].to("cpu")


def subspace(gradient: Tensor, rank: int) -> Tensor:
    """Return the first singular vectors of a gradient's shorter side, found on the host. Shape: (side, rank), fp32."""
    left, _, right = torch.linalg.svd(gradient.float().cpu(), full_matrices=False)
    basis = right[:rank].T if gradient.shape[0] >= gradient.shape[1] else left[:, :rank]
    return basis.contiguous().to(gradient.device)


def subset_of(count: int, size: int) -> int:
    """Return how many elements share a number: the largest divisor of their count up to `size`; negative: sqrt(count) / -size."""
    wanted = size if size > 0 else int(math.sqrt(count) / -size)
    return next(divisor for divisor in range(max(1, min(wanted, count)), 0, -1) if count % divisor == 0)
