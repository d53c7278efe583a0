"""References of fused npu:: operators: pure functions of CPU tensors, strict about what hardware takes.

A reference has the run-time schema's arguments, computes in fp32 and rounds once, and raises Refused where a documented
limit is broken. To add one: write the function (and that of the backward operator which the wheel's autograd formula
calls) in the module of its kind, and a line here; test_references.py then compares its signature with the wheel's.
"""

from __future__ import annotations

_MODULES = {
    "attention_ops": (
        "npu_fusion_attention", "npu_fusion_attention_grad", "npu_fusion_attention_v2",
        "npu_fusion_attention_grad_v2", "npu_fusion_attention_v3", "npu_fusion_attention_grad_v3",
    ),
}  # fmt: skip

REFERENCES: dict[str, str] = {
    f"npu::{op}": f"simulator.fused.{module}:{op}" for module, ops in _MODULES.items() for op in ops
}
