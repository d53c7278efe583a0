"""The attention function as a processor of diffusers' Attention modules (UNet, VAE), and the choice of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.device.attend import attention, takes_fp32

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.device.torch_device import Device

# A float bias in diffusers' UNet is 0 where kept and -10000 where not.
_DROPPED_BELOW = -1000.0


class AttentionProcessor:
    """Do what diffusers' AttnProcessor2_0 does, with `attention`.

    A float mask is read as diffusers writes it, 0 = keep and -10000 = drop, and handed on as bool.
    """

    def __init__(self, fused: bool = True) -> None:
        self.fused = fused

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Attend over (B, L, C), or (B, C, H, W) with its positions as the sequence."""
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if residual.ndim == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        keep = _keep_mask(attn, attention_mask, context)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        if encoder_hidden_states is None:
            context = hidden_states
        elif attn.norm_cross:
            context = attn.norm_encoder_hidden_states(context)

        q, k, v = (
            _split_heads(attn, project(x))
            for project, x in ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        )
        if attn.norm_q is not None:
            q = attn.norm_q(q)
        if attn.norm_k is not None:
            k = attn.norm_k(k)
        out = attention(q, k, v, keep, fused=self.fused).transpose(1, 2).flatten(2).to(q.dtype)

        out = attn.to_out[1](attn.to_out[0](out))
        if residual.ndim == 4:
            out = out.transpose(1, 2).reshape(residual.shape)
        if attn.residual_connection:
            out = out + residual
        return out / attn.rescale_output_factor


def _split_heads(attn: Any, x: Tensor) -> Tensor:
    """(B, L, N D) -> (B, N, L, D)."""
    return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)


def _keep_mask(attn: Any, mask: Tensor | None, context: Tensor) -> Tensor | None:
    """Return diffusers' mask as bool, True = keep, of shape (B, N, 1 or S, L)."""
    if mask is None:
        return None
    batch, length = context.shape[:2]
    mask = attn.prepare_attention_mask(mask, length, batch)
    mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
    return mask if mask.dtype == torch.bool else mask > _DROPPED_BELOW


def use_attention(
    module: nn.Module, device: Device, *, fused: bool = False, choice: str = "auto", precision: str = "no"
) -> str:
    """Set the attention of every plain Attention module inside `module`; return the sentence to say once.

    fused: --enable_npu_flash_attention. choice: "auto", "sdpa", "xformers" or "mem_eff", as kohya's flags ask.
    precision: what q, k and v will be computed in, "no", "fp16" or "bf16".
    """
    from diffusers.models import attention_processor as known

    plain = tuple(
        getattr(known, name)
        for name in ("AttnProcessor", "AttnProcessor2_0", "AttnProcessorNPU", "XFormersAttnProcessor")
        if hasattr(known, name)
    )
    use_fused = device.kind == "npu" and (fused or choice != "sdpa")
    processor: Any = AttentionProcessor(use_fused)
    count = 0
    for part in module.modules():
        # scale_qk off means a scale that the plain processors of diffusers ignore: leave such a module alone.
        if (
            isinstance(part, known.Attention)
            and isinstance(part.processor, (*plain, AttentionProcessor))
            and part.scale_qk
        ):
            part.set_processor(processor)
            count += 1
    return f"attention: {_sentence(device, fused, choice, precision, use_fused)}, in {count} modules"


def _sentence(device: Device, fused: bool, choice: str, precision: str, use_fused: bool) -> str:
    asked = [flag for flag, on in (("--enable_npu_flash_attention", fused), (f"--{choice}", choice != "auto")) if on]
    if choice == "mem_eff":
        asked[-1] = "--mem_eff_attn"
    because = f" ({', '.join(asked)} asked for)" if asked else ""
    if not use_fused:
        return f"torch's scaled_dot_product_attention on {device.kind}{because}"
    if precision == "no" and not takes_fp32():
        return f"torch's scaled_dot_product_attention on npu in fp32, which this CANN does not fuse{because}"
    return f"npu_fusion_attention where its limits allow{because}"
