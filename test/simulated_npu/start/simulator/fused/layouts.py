"""Casts, transposes and internal formats. A format is recorded by the operator's count and changes nothing here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simulator.fused.limits import WHEEL_META, docs, refuse, require

# the numbers of torch's ScalarType: TORCH_DTYPE_ENUM_VALUE_TO_SCALAR_TYPE_MAP of the wheel, less what it has for 950
_DTYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip


def npu_dtype_cast(input: Tensor, dtype: int, input_dtype: int | None = None) -> Tensor:
    """Return the tensor in another dtype, given by its number."""
    _no_foreign("npu_dtype_cast", input_dtype)
    return input.to(_dtype("npu_dtype_cast", dtype), copy=True)


def npu_dtype_cast_(input: Tensor, src: Tensor) -> Tensor:
    """Write src, cast, into the tensor."""
    return input.copy_(src)


def npu_dtype_cast_backward(
    grad: Tensor, dtype: torch.dtype | int, grad_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Return the gradient in the dtype of what was cast."""
    _no_foreign("npu_dtype_cast_backward", input_dtype)
    return grad.to(_dtype("npu_dtype_cast_backward", dtype), copy=True)


def _npu_dtype_cast(input: Tensor, dtype: torch.dtype | int) -> Tensor:
    """Return the tensor in another dtype."""
    return input.to(_dtype("_npu_dtype_cast", dtype), copy=True)


def _npu_dtype_cast_backward(grad: Tensor, dtype: torch.dtype | int) -> Tensor:
    """Return the gradient in the dtype of what was cast."""
    return grad.to(_dtype("_npu_dtype_cast_backward", dtype), copy=True)


def _npu_format_cast(input: Tensor, acl_format: int) -> Tensor:
    """Return a copy: internal formats order memory, which only hardware has."""
    return input.clone()


def _npu_format_cast_aclnn(input: Tensor, acl_format: int, customize_dtype: int) -> Tensor:
    """Return a copy."""
    return input.clone()


def _npu_format_cast_input_dtype(input: Tensor, acl_format: int, customize_dtype: int, input_dtype: int) -> Tensor:
    """Return a copy."""
    return input.clone()


def npu_format_cast__acl_format(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Return the tensor itself."""
    return input


def npu_format_cast_(
    input: Tensor, src: Tensor, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Return the tensor itself."""
    return input


def npu_transpose(input: Tensor, perm: Sequence[int], require_contiguous: bool = True) -> Tensor:
    """Return the permuted tensor, contiguous."""
    _check_permutation("npu_transpose", input, perm)
    return input.permute(list(perm)).clone(memory_format=torch.contiguous_format)


def npu_transpose_out(input: Tensor, perm: Sequence[int], require_contiguous: bool = True, *, out: Tensor) -> Tensor:
    """Write the permuted tensor to out."""
    _check_permutation("npu_transpose", input, perm)
    return out.copy_(input.permute(list(perm)))


def _check_permutation(op: str, input: Tensor, perm: Sequence[int]) -> None:
    require(
        sorted(each % max(input.ndim, 1) for each in perm) == list(range(input.ndim)),
        op, f"perm {list(perm)} of {input.ndim} dimensions", "perm names each dimension once", docs(op),
    )  # fmt: skip


def _no_foreign(op: str, input_dtype: int | None) -> None:
    require(
        input_dtype is None or input_dtype in _DTYPES, op, f"input_dtype {input_dtype}",
        "dtypes that torch does not have exist on Ascend 950 only", WHEEL_META,
    )  # fmt: skip


def _dtype(op: str, of: torch.dtype | int) -> torch.dtype:
    if isinstance(of, torch.dtype):
        return of
    if of not in _DTYPES:
        refuse(op, f"dtype number {of}", f"one of {sorted(_DTYPES)}", WHEEL_META)
    return _DTYPES[of]
