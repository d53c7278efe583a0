"""The choice of the attention, in one place, and its reason; every module that attends is given it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from difftrain.device import patches
from difftrain.device.attend import takes_fp32
from difftrain.device.attention_dispatch import name_backend, set_attention
from difftrain.device.attention_joint import (
    AttentionProcessor,
    AuraFlowAttention,
    HiDreamAttention,
    JointAttention,
    Lumina2Attention,
)

if TYPE_CHECKING:
    from torch import nn

    from difftrain.device.torch_device import Device

# diffusers' processors that do not ask its dispatcher, and what does the same. PAG and adapters of their own keep theirs.
_PLAIN = ("AttnProcessor", "AttnProcessor2_0", "AttnProcessorNPU", "XFormersAttnProcessor")
_OURS: dict[str, type[Any]] = {
    **dict.fromkeys(_PLAIN, AttentionProcessor),
    "JointAttnProcessor2_0": JointAttention,
    "XFormersJointAttnProcessor": JointAttention,
    "AuraFlowAttnProcessor2_0": AuraFlowAttention,
    "Lumina2AttnProcessor2_0": Lumina2Attention,
    "HiDreamAttnProcessor": HiDreamAttention,
}


def use_attention(
    module: nn.Module, device: Device, *, fused: bool = False, choice: str = "auto", precision: str = "no"
) -> str:
    """Set the attention of every module inside `module` that attends; return the sentence to say once.

    fused: --enable_npu_flash_attention. choice: "auto", "sdpa", "xformers" or "mem_eff", as kohya's flags ask.
    precision: what q, k and v will be computed in, "no", "fp16" or "bf16".
    """
    patches.apply("diffusers")
    on_npu = device.kind == "npu"
    use_fused = on_npu and (fused or choice != "sdpa")
    made: dict[type[Any], Any] = {kind: kind(use_fused) for kind in _OURS.values()}

    # modules that attend, those of transformers as a whole
    count = 0
    inside: set[int] = set()  # of a transformers model that is set as a whole
    part: Any
    for part in module.modules():
        if id(part) in inside:
            continue
        if attending := set_attention(part, use_fused):
            inside.update(map(id, part.modules()))
            count += attending
            continue
        kind = _kind_of(part)
        if kind is not None:
            part.set_processor(made[kind])
            count += 1
        elif name_backend(getattr(part, "processor", None), use_fused or not on_npu, on_npu):
            count += 1
    return f"attention: {_sentence(device, fused, choice, precision, use_fused)}, in {count} modules"


def _kind_of(part: Any) -> type[Any] | None:
    """Return what replaces a module's processor, or None where it is to stay."""
    processor = type(getattr(part, "processor", None))
    if not hasattr(part, "set_processor"):
        return None
    kind = processor if processor in _OURS.values() else None
    if kind is None and processor.__module__.startswith("diffusers."):
        kind = _OURS.get(processor.__name__)
    # scale_qk off means a scale that the plain processors of diffusers ignore: leave such a module alone.
    return None if kind is AttentionProcessor and not part.scale_qk else kind


def _sentence(device: Device, fused: bool, choice: str, precision: str, use_fused: bool) -> str:
    asked = [flag for flag, on in (("--enable_npu_flash_attention", fused), (f"--{choice}", choice != "auto")) if on]
    if choice == "mem_eff":
        asked[-1] = "--mem_eff_attn"
    because = f" ({', '.join(asked)} asked for)" if asked else ""
    if not use_fused:
        return f"torch's scaled_dot_product_attention on {device.kind}{because}"
    if precision == "no" and not takes_fp32():
        return f"torch's scaled_dot_product_attention on npu in fp32, which this CANN does not fuse{because}"
    by_itself = "" if asked else " (the default on npu; --sdpa for torch's own)"
    return f"npu_fusion_attention where its limits allow{because or by_itself}"
