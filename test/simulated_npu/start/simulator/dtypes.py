"""Tables of the policy: what takes fp64 and complex, what HCCL moves, which kernels fall back to the CPU inside.

The lists of operators are those that torch_npu documents as taking the dtype on the A2 and A3 series (Ascend/pytorch,
docs/zh/native_apis/pytorch_2-10-0/torch.md and torch-nn-functional.md), by the names that the dispatcher sees; mul and
reciprocal of fp64 from the dtype lists of aclnn_mul.cpp and aclnn_reciprocal.cpp (hicann/ops-math).
"""

from __future__ import annotations

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMPLEX = (torch.complex64, torch.complex128)

# Make, move, view and fill: no arithmetic, any dtype.
MOVES = _names("""
    empty empty_like empty_strided new_empty new_empty_strided zero zeros zeros_like ones ones_like full full_like fill
    copy clone contiguous _to_copy _copy_from _copy_from_and_resize detach alias lift_fresh set resize record_stream
    view as_strided _reshape_alias _unsafe_view expand permute transpose t squeeze unsqueeze select slice narrow split
    split_with_sizes chunk unbind diagonal unfold view_as_real view_as_complex movedim flatten unflatten
    _local_scalar_dense is_pinned _pin_memory broadcast_tensors select_backward slice_backward equal
""")

MATMULS = _names("""
    matmul mm bmm addmm addmv addbmm baddbmm addr mv dot vdot linear einsum tensordot matmul_backward linear_backward
    convolution convolution_backward convolution_overrideable _convolution conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d bilinear _addmm_activation
""")

FP64_DOCUMENTED = _names("""
    arange linspace argwhere cat stack scatter slice_scatter where bernoulli rand_like abs acosh add addcmul asin atan
    clamp clamp_min clamp_max cosh erf exp floor log log10 log2 mul pow round sinh sqrt sub tan argmax all any sum unique
    _unique2 ge le isfinite isin isinf isnan topk cummin _cummin_helper cumprod diag_embed searchsorted reciprocal
    _softmax softmax _softmax_backward_data _foreach_sqrt glu elu leaky_relu hardtanh constant_pad_nd reflection_pad1d
    reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    adaptive_max_pool3d max_unpool2d _ctc_loss pixel_shuffle pixel_unshuffle native_dropout normal uniform random
""")
# One number, once a step: what torch's own GradScaler asks for (reciprocal of its scale). Slow, and not felt.
FP64_OF_A_STEP = frozenset({"reciprocal"})

_COMPLEX_DOCUMENTED = _names("""
    mul exp log log10 log2 cos cosh tan asinh acosh atanh sigmoid rsqrt reciprocal neg sgn square eq ne isinf isnan
    mean prod cumsum flip linspace scatter cross linalg_cross logical_and logical_or logical_xor count_nonzero
    diag_embed slogdet sin linalg_slogdet native_dropout pixel_shuffle
""")
COMPLEX128_DOCUMENTED = _COMPLEX_DOCUMENTED | {"float_power"}
COMPLEX64_DOCUMENTED = _COMPLEX_DOCUMENTED | {"angle", "cat", "polar", "complex", "diag", "ldexp"}
COMPLEX64_ON_AI_CORE = frozenset({"mul", "polar", "complex", "cat"})

HCCL = frozenset(
    {
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
        torch.float16, torch.float32, torch.float64, torch.bfloat16,
    }
)  # fmt: skip
NOT_HCCL_REDUCTIONS = frozenset({"AVG", "PREMUL_SUM"})

# torch_npu registers kernels for these that warn "is currently not supported on the NPU backend. Now this operator will
# fallback to run on the CPU" (strings of libtorch_npu.so 2.13.0): the dispatcher does not show it.
FALLS_BACK = frozenset(
    {
        "aten::_fused_adam_", "aten::_fused_adam_.tensor_lr", "aten::_masked_softmax",
        "aten::_transform_bias_rescale_qkv", "aten::logit", "aten::logit_", "aten::logit.out", "aten::logit_backward",
        "aten::logit_backward.grad_input", "aten::scatter_reduce.two", "aten::scatter_reduce.two_out",
        "aten::scatter_reduce_.two", "aten::unfold_backward",
    }
)  # fmt: skip
