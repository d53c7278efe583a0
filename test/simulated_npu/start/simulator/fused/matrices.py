"""npu_linear, npu_bmmV2, and the second derivatives of a matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simulator.fused.limits import docs, refuse, require, require_dtype, require_same_dtype


def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return input @ weight.T + bias of two-dimensional tensors."""
    _check_linear("npu_linear", input, weight)
    out = input.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(input.dtype)


def npu_linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight."""
    _check_linear("npu_linear_backward", input, weight)
    dy = grad.float()
    return (dy @ weight.float()).to(input.dtype), (dy.t() @ input.float()).to(weight.dtype)


def npu_bmmV2(input: Tensor, mat2: Tensor, output_sizes: Sequence[int]) -> Tensor:
    """Return the batched product, summed to output_sizes where those are given."""
    _check_product("npu_bmmV2", input, mat2)
    return _summed(input.float() @ mat2.float(), output_sizes).to(input.dtype)


def npu_bmm_v2_mat1_backward(grad: Tensor, mat1: Tensor, mat2: Tensor, size: Sequence[int]) -> Tensor:
    """Return the gradient of the left matrix, of the given size."""
    return _summed(grad.float() @ mat2.float().mT, size).to(mat1.dtype)


def npu_bmm_v2_mat2_backward(grad: Tensor, mat1: Tensor, mat2: Tensor, size: Sequence[int]) -> Tensor:
    """Return the gradient of the right matrix, of the given size."""
    return _summed(mat1.float().mT @ grad.float(), size).to(mat2.dtype)


def matmul_double_backward(
    grad_self: Tensor | None, grad_other: Tensor | None, grad_out: Tensor, input: Tensor, other: Tensor,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of (grad_out, input, other) given those of what matmul_backward returned."""
    if input.ndim < 2 or other.ndim < 2:
        refuse("matmul_double_backward", "a vector", "this reference takes matrices", "the simulator itself")
    total = [torch.zeros(each.shape) for each in (grad_out, input, other)]
    if grad_self is not None:
        total[0] = total[0] + grad_self.float() @ other.float()
        total[2] = total[2] + _summed(grad_self.float().mT @ grad_out.float(), other.shape)
    if grad_other is not None:
        total[0] = total[0] + input.float() @ grad_other.float()
        total[1] = total[1] + _summed(grad_out.float() @ grad_other.float().mT, input.shape)
    like = (grad_out, input, other)
    out = [each.to(of.dtype) if wanted else None for each, of, wanted in zip(total, like, mask)]
    return out[0], out[1], out[2]


def _summed(x: Tensor, size: Sequence[int]) -> Tensor:
    return x if not len(size) or tuple(x.shape) == tuple(size) else x.sum_to_size(list(size))


def _check_linear(op: str, input: Tensor, weight: Tensor) -> None:
    source = docs("npu_linear")
    for name, each in (("input", input), ("weight", weight)):
        require(each.ndim == 2, op, f"{name} has {each.ndim} dimensions", f"{name} is a matrix", source)
        require_dtype(op, name, each, (torch.float16, torch.float32), source)
    require_same_dtype(op, source, input=input, weight=weight)


def _check_product(op: str, input: Tensor, mat2: Tensor) -> None:
    source = docs("npu_bmmV2")
    for name, each in (("input", input), ("mat2", mat2)):
        require(each.ndim >= 2, op, f"{name} has {each.ndim} dimensions", f"{name} has at least 2", source)
        require_dtype(op, name, each, (torch.float16, torch.float32), source)
    require_same_dtype(op, source, input=input, mat2=mat2)
