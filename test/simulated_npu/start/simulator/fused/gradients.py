"""Backward operators that torch_npu's own autograd formulas of torch's operators call: not fused, but npu:: all the same.

F.l1_loss, F.kl_div, F.binary_cross_entropy_with_logits, gather and repeat_interleave end here on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MEAN = 1  # at::Reduction


def l1_loss_backward(grad_output: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Return the gradient of |input - target|."""
    slope = torch.sign(input.float() - target.float()) * grad_output.float()
    return _averaged(slope, reduction).to(input.dtype)


def kl_div_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Tensor:
    """Return the gradient of the logarithms in kl_div."""
    weight = target.float().exp() if log_target else target.float()
    slope = -weight * grad_output.float()
    if not log_target:
        slope = torch.where(target > 0, slope, 0.0)
    return _averaged(slope, reduction).to(input.dtype)


def kl_div_target_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Tensor:
    """Return the gradient of the target in kl_div."""
    x, t = input.float(), target.float()
    slope = t.exp() * (1 + t - x) if log_target else torch.where(t > 0, 1 + t.log() - x, 0.0)
    return _averaged(slope * grad_output.float(), reduction).to(target.dtype)


def npu_binary_cross_entropy_with_logits_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, weight_opt: Tensor | None, pos_weight_opt: Tensor | None,
    reduction: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits."""
    x, t = input.float(), target.float()
    if pos_weight_opt is None:
        slope = torch.sigmoid(x) - t
    else:
        positive = pos_weight_opt.float() * t
        slope = (positive + 1 - t) * torch.sigmoid(x) - positive
    if weight_opt is not None:
        slope = slope * weight_opt.float()
    return _averaged(slope * grad_output.float(), reduction).to(input.dtype)


def npu_gather_backward(grad: Tensor, self_size: Sequence[int], dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    """Return the gradient of what was gathered from, added up where an index occurs twice."""
    return torch.zeros(list(self_size), dtype=grad.dtype).scatter_add_(dim, index, grad)


def repeat_interleave_backward_int(grad: Tensor, input: Tensor, repeats: int, dim: int | None = None) -> Tensor:
    """Return the gradient of the repeated tensor, each element repeated equally often."""
    axis = 0 if dim is None else dim % input.ndim
    shape = input.reshape(-1).shape if dim is None else input.shape
    return grad.unflatten(axis, (shape[axis], repeats)).sum(axis + 1).reshape(input.shape)


def repeat_interleave_backward_tensor(grad: Tensor, input: Tensor, repeats: Tensor, dim: int | None = None) -> Tensor:
    """Return the gradient of the repeated tensor, each element repeated its own number of times."""
    flat = input.reshape(-1) if dim is None else input
    axis = 0 if dim is None else dim % input.ndim
    counts = repeats.reshape(-1).expand(flat.shape[axis])
    places = torch.repeat_interleave(torch.arange(flat.shape[axis]), counts)
    return torch.zeros(flat.shape, dtype=grad.dtype).index_add_(axis, places, grad).reshape(input.shape)


def _averaged(slope: Tensor, reduction: int) -> Tensor:
    return slope / slope.numel() if reduction == MEAN else slope
