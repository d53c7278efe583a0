"""Muon for matrix weights, AdamW for all else: one optimizer, one state, one schedule.

Source: Jordan et al. 2024 (the method); Liu et al. 2025, arXiv:2502.16982 (decay, and the size of an update that lets
AdamW's rate serve both).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim import AdamW, Optimizer

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.optim.making import TYPE, OptimizerOrder, construct

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.contracts import Group

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUSTMENTS = ("match_rms_adamw", "original")
_TINY = 1e-7
_IN_A_BLOCK = re.compile(r"(?:^|\.)\w*(?:blocks?|layers|attentions|resnets)\.\d+\.")
_NO_MATRIX = re.compile(r"norm|emb|modulation|adaln", re.IGNORECASE)


def is_matrix(name: str, weight: Tensor) -> bool:
    """Tell whether a weight maps hidden states to hidden states: two-dimensional, within a numbered block.

    Embeddings, the ways into and out of a network, and what makes scales and shifts of the time are none.
    """
    inside = _IN_A_BLOCK.search(name) is not None and _NO_MATRIX.search(name) is None
    return inside and weight.ndim == 2 and min(weight.shape) > 1


def make(order: OptimizerOrder) -> Optimizer:
    """Make it, each group cut in two. Raises ConfigFault where there is no matrix, or arguments are out of range."""
    tables = [table for group in order.groups for table in cut_matrices(group)]
    if order.trial and not any(table["matrix"] for table in tables):
        what = f"{order.name} is for matrices inside blocks, and no trained parameter is one"
        raise ConfigFault([Fault(option(TYPE), what, f"{option('optimizer.type')}=AdamW")])
    return construct(OptimizerOrder(order.name, tables, order.lr, order.arguments), Muon, fused=order.fused_ok)


def cut_matrices(group: Group) -> Iterator[dict[str, Any]]:
    """Yield the matrices of a group, then its other weights, where there are some."""
    matrices = group.matrices
    of: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, weight in group.named_params:
        of[is_matrix(name, weight) if matrices is None else name in matrices].append(weight)
    for matrix, weights in of.items():
        if weights:
            name = group.name if matrix else f"{group.name}_adamw"
            table = {"params": weights, "lr": group.lr, "name": name, "matrix": matrix}
            yield table if group.weight_decay is None else {**table, "weight_decay": group.weight_decay}


class MatrixShard(Protocol):
    """Rows of a matrix that other ranks hold the rest of. full_tensor is collective."""

    shape: tuple[int, ...]

    def full_tensor(self, rows: Tensor) -> Tensor: ...
    def cut(self, tensor: Tensor) -> Tensor: ...


class Muon(Optimizer):
    """Update matrices along their orthogonalised momentum, and other weights by AdamW.

    params: tables with "matrix". adamw_lr: AdamW's rate where a group's is `lr`; as there are groups with other rates,
    it is kept in proportion. adjust_lr: match_rms_adamw makes an update as large as AdamW's usually are, 0.2 a weight;
    original is sqrt(max(1, rows / columns)).
    """

    steps_apart = True  # each weight is updated from its own gradient and state alone
    shards: Mapping[int, MatrixShard] = MappingProxyType({})  # of weights that are rows of matrices, by their ids

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        weight_decay: float = 0.01,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = False,
    ) -> None:
        _check(momentum, ns_steps, adjust_lr, weight_decay, adamw_lr)

        # --- what Muon does not update goes to AdamW, at its own rate
        matrices = [table for table in params if table["matrix"]]
        vectors = [table for table in params if not table["matrix"]]
        share = 1.0 if adamw_lr is None else adamw_lr / lr
        for table in vectors:
            table["lr"] = table.get("lr", lr) * share
        decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
        self._adamw = AdamW(vectors or [{"params": []}], lr * share, betas, eps, decay, fused=fused or None)

        # --- Muon's own groups, in the order they came in
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
        }
        for table in matrices:
            for key, value in defaults.items():
                table.setdefault(key, value)
        groups = iter(self._adamw.param_groups)
        super().__init__([table if table["matrix"] else next(groups) for table in params], {})
        self._step_supports_amp_scaling = fused  # so a skipped update costs no look of the host, here as with AdamW

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update; where `found_inf` is set to 1 on the device, change nothing. Closures are not for it."""
        assert closure is None
        skipped = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["matrix"]:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self._update(weight, group, skipped)
        # groups and state are shared, so that schedules and checkpoints see one optimizer
        self._adamw.param_groups = [group for group in self.param_groups if not group["matrix"]]
        self._adamw.state = self.state
        if skipped is not None:
            self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        try:
            self._adamw.step()
        finally:
            if skipped is not None:
                del self._adamw.found_inf  # type: ignore[attr-defined]

    def _update(self, weight: Tensor, group: dict[str, Any], skipped: Tensor | None) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        kept, mu = state["momentum_buffer"], group["momentum"]
        rate, decay = group["lr"], group["lr"] * group["weight_decay"]
        if skipped is None:
            kept.lerp_(gradient, 1 - mu)
        else:  # 0 in place of what is not finite, and no step
            counts = 1 - skipped.to(weight.device, weight.dtype)
            gradient = torch.where(counts > 0, gradient, 0)
            kept.lerp_(gradient, (1 - mu) * counts)
        # Nesterov: look ahead along the momentum before it is orthogonalised
        ahead = gradient.lerp(kept, mu) if group["nesterov"] else kept
        shard = self.shards.get(id(weight))
        if shard is None:
            direction = orthogonalised(ahead, group["ns_steps"])
        else:  # rows alone are another matrix: every rank makes the same of the whole one, and keeps its rows
            direction = shard.cut(orthogonalised(shard.full_tensor(ahead), group["ns_steps"])).to(weight.device)
        size = rate * _size(weight.shape if shard is None else shard.shape, group["adjust_lr"])
        if skipped is None:
            weight.mul_(1 - decay).add_(direction, alpha=-size)
        else:
            weight.mul_(1 - decay * counts).sub_(direction * (size * counts))


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Bring the singular values of a matrix near 1 by a quintic Newton-Schulz iteration, in bf16.

    Shapes: (N, M) -> (N, M). Range: about 0.7 to 1.2 after five steps; Jordan et al. choose the steepest at 0.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    # gram = x x^T is the smaller of the two products this way round
    x = x.T if tall else x
    # the Frobenius norm bounds the largest singular value, which must not exceed 1 here
    x = x / x.norm().clamp(min=_TINY)
    for _ in range(steps):
        # x <- a x + (b A + c A^2) x with A = x x^T
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _size(shape: tuple[int, ...], adjust_lr: str) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if adjust_lr == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def _check(momentum: float, ns_steps: int, adjust_lr: str, weight_decay: float, adamw_lr: float | None) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if not (isinstance(ns_steps, int) and 1 <= ns_steps < 100):
        raise ValueError(f"ns_steps is a number from 1 to 99, got {ns_steps}")
    if adjust_lr not in ADJUSTMENTS:
        raise ValueError(f"adjust_lr is {' or '.join(ADJUSTMENTS)}, got {adjust_lr!r}")
    if weight_decay < 0 or (adamw_lr is not None and adamw_lr < 0):
        raise ValueError("weight_decay and adamw_lr must not be negative")
