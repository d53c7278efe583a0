"""npu_apply_adam and npu_apply_adam_w, which change var, m and v in place, and what loss scaling asks of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simulator.fused.limits import FLOATS, docs, refuse, require, require_dtype, require_same_dtype

Number = float | int
Three = tuple[Tensor, Tensor, Tensor]


def npu_apply_adam_w(
    beta1_power: Number, beta2_power: Number, lr: Number, weight_decay: Number, beta1: Number, beta2: Number,
    epsilon: Number, grad: Tensor, max_grad_norm: Tensor | None, amsgrad: bool | None, maximize: bool | None,
) -> Three:  # fmt: skip
    """Refuse: the operator only exists with out=(var, m, v)."""
    refuse("npu_apply_adam_w", "no out", "var, m and v are given as out", docs("npu_apply_adam_w"))


def npu_apply_adam_w_out(
    beta1_power: Number, beta2_power: Number, lr: Number, weight_decay: Number, beta1: Number, beta2: Number,
    epsilon: Number, grad: Tensor, max_grad_norm: Tensor | None, amsgrad: bool | None, maximize: bool | None, *,
    out: Sequence[Tensor],
) -> Three:  # fmt: skip
    """Update out = (var, m, v) by AdamW. The powers are of the step before: beta^(t-1); the kernel multiplies once more.

    With amsgrad, max_grad_norm holds the greatest v so far, and is written.
    """
    op = "npu_apply_adam_w"
    var, m, v = _state(op, grad, out)
    if amsgrad:
        if max_grad_norm is None:
            refuse(op, "amsgrad without max_grad_norm", "amsgrad wants max_grad_norm", docs(op))
        require_same_dtype(op, docs(op), var=var, max_grad_norm=max_grad_norm)
        require(max_grad_norm.shape == var.shape, op, f"{list(max_grad_norm.shape)}", "of var's shape", docs(op))
    gradient = -grad.float() if maximize else grad.float()
    first = beta1 * m.float() + (1 - beta1) * gradient
    second = beta2 * v.float() + (1 - beta2) * gradient.square()
    highest = second
    if amsgrad:
        assert max_grad_norm is not None
        highest = torch.maximum(max_grad_norm.float(), second)
        max_grad_norm.copy_(highest)
    of_first, of_second = 1 - beta1_power * beta1, 1 - beta2_power * beta2
    step = lr / of_first * first / ((highest / of_second).sqrt() + epsilon)
    var.copy_(var.float() * (1 - lr * weight_decay) - step)
    m.copy_(first)
    v.copy_(second)
    return var, m, v


def npu_apply_adam(
    beta1_power: Number, beta2_power: Number, lr: Number, beta1: Number, beta2: Number, epsilon: Number, grad: Tensor,
    use_locking: bool | None, use_nesterov: bool | None,
) -> Three:  # fmt: skip
    """Refuse: the operator only exists with out=(var, m, v)."""
    refuse("npu_apply_adam", "no out", "var, m and v are given as out", docs("npu_apply_adam"))


def npu_apply_adam_out(
    beta1_power: Number, beta2_power: Number, lr: Number, beta1: Number, beta2: Number, epsilon: Number, grad: Tensor,
    use_locking: bool | None, use_nesterov: bool | None, *, out: Sequence[Tensor],
) -> Three:  # fmt: skip
    """Update out = (var, m, v) by Adam. The powers are of this step, beta^t, as ApplyAdam of TensorFlow has them."""
    var, m, v = _state("npu_apply_adam", grad, out)
    gradient = grad.float()
    first = m.float() + (gradient - m.float()) * (1 - beta1)
    second = v.float() + (gradient.square() - v.float()) * (1 - beta2)
    rate = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    direction = beta1 * first + (1 - beta1) * gradient if use_nesterov else first
    var.copy_(var.float() - rate * direction / (second.sqrt() + epsilon))
    m.copy_(first)
    v.copy_(second)
    return var, m, v


def _amp_foreach_non_finite_check(scaled_grads: Sequence[Tensor]) -> bool:
    """Tell whether any gradient has an infinity or a NaN."""
    return any(not bool(torch.isfinite(each).all()) for each in scaled_grads)


def _state(op: str, grad: Tensor, out: Sequence[Tensor]) -> Three:
    source = docs(op)
    require(len(out) == 3, op, f"{len(out)} tensors in out", "out is (var, m, v)", source)
    var, m, v = out
    require_dtype(op, "grad", grad, FLOATS, source)
    require_same_dtype(op, source, grad=grad, var=var, m=m, v=v)
    require(
        grad.shape == var.shape == m.shape == v.shape and 1 <= grad.ndim <= 8,
        op, f"shapes {[list(each.shape) for each in (grad, var, m, v)]}", "grad, var, m and v have one shape, 1-8 D",
        source,
    )  # fmt: skip
    return var, m, v
