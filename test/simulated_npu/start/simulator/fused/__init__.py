"""References of fused npu:: operators: pure functions of CPU tensors, strict about what hardware takes.

A reference has the run-time schema's arguments, computes in fp32 and rounds once, and raises Refused where a documented
limit is broken. To add one: write the function (and that of the backward operator which the wheel's autograd formula
calls) in the module of its kind, and a name here; test_references.py then compares its signature with the wheel's.
"""

from __future__ import annotations

# module -> operators; "name.overload" is the function name_overload
_MODULES = {
    "attention_ops": (
        "npu_fusion_attention", "npu_fusion_attention_grad", "npu_fusion_attention_v2",
        "npu_fusion_attention_grad_v2", "npu_fusion_attention_v3", "npu_fusion_attention_grad_v3",
    ),
    "norms": ("npu_rms_norm", "npu_rms_norm_backward", "npu_add_rms_norm", "npu_layer_norm_eval"),
    "activations": (
        "npu_swiglu", "npu_swiglu_backward", "npu_geglu", "npu_geglu_grad", "npu_gelu", "npu_gelu_backward",
        "npu_fast_gelu", "fast_gelu", "npu_fast_gelu_backward", "npu_silu", "npu_silu_", "npu_silu_backward",
    ),
    "rotary": ("npu_rotary_mul", "npu_rotary_mul_backward"),
    "optimizers": (
        "npu_apply_adam_w", "npu_apply_adam_w.out", "npu_apply_adam", "npu_apply_adam.out",
        "_amp_foreach_non_finite_check",
    ),
    "dropout": (
        "_npu_dropout", "npu_dropout_backward", "npu_dropout_do_mask", "_npu_dropout_gen_mask.Tensor",
        "_dropout_with_byte_mask", "_dropout_with_byte_mask_backward",
    ),
    "matrices": (
        "npu_linear", "npu_linear_backward", "npu_bmmV2", "npu_bmm_v2_mat1_backward", "npu_bmm_v2_mat2_backward",
        "matmul_double_backward",
    ),
    "layouts": (
        "npu_dtype_cast", "npu_dtype_cast_", "npu_dtype_cast_backward", "_npu_dtype_cast", "_npu_dtype_cast_backward",
        "_npu_format_cast", "_npu_format_cast.aclnn", "_npu_format_cast.input_dtype", "npu_format_cast_",
        "npu_format_cast_.acl_format", "npu_transpose", "npu_transpose.out",
    ),
    "softmaxes": ("npu_scaled_masked_softmax", "npu_scaled_masked_softmax_backward"),
    "gradients": (
        "l1_loss_backward", "kl_div_backward", "kl_div_target_backward",
        "npu_binary_cross_entropy_with_logits_backward", "npu_gather_backward", "repeat_interleave_backward_int",
        "repeat_interleave_backward_tensor",
    ),
    "status": ("npu_alloc_float_status", "npu_clear_float_status", "npu_get_float_status"),
}  # fmt: skip
_RENAMED = {"_npu_dropout_gen_mask.Tensor": "_npu_dropout_gen_mask"}

REFERENCES: dict[str, str] = {
    f"npu::{op}": f"simulator.fused.{module}:{_RENAMED.get(op, op.replace('.', '_'))}"
    for module, ops in _MODULES.items()
    for op in ops
}
