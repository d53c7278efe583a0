"""The choice of the attention, in one place, and its reason; every module that attends is given it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.device import patches
from difftrain.device.attend import attention, takes_fp32
from difftrain.device.attention_dispatch import calls_ours, name_backend, set_attention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.device.sequence import TokenShare
    from difftrain.device.torch_device import Device


# --- The attention function as a processor of transformers whose modules have their own: SD3, AuraFlow, Lumina2, HiDream,
# Cosmos, HunyuanVideo-1.5
# Each does what diffusers' processor of that name does, with `attention`, and keeps q, k and v as (B, L, N, D) in memory,
# which the fused operator takes without a copy.


class _Processor:
    def __init__(self, fused: bool = True) -> None:
        self.fused = fused

    def attend(self, qkv: Sequence[Tensor], mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        """Attend over (B, L, N, D); return (B, L, N D)."""
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return attention(q, k, v, mask, scale=scale, fused=self.fused).transpose(1, 2).flatten(2).to(q.dtype)


class JointAttention(_Processor):
    """Do what JointAttnProcessor2_0 does (SD3): picture and text in one sequence, or the picture alone."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend; attention_mask is not read, as in diffusers."""
        qkv = _of_picture(attn, hidden_states)
        if encoder_hidden_states is None:
            return _out(attn, self.attend(qkv))
        text = _of_text(attn, encoder_hidden_states)
        out = self.attend([torch.cat([a, b], dim=1) for a, b in zip(qkv, text)])
        picture, words = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return _out(attn, picture), words if attn.context_pre_only else attn.to_add_out(words)


class AuraFlowAttention(_Processor):
    """Do what AuraFlowAttnProcessor2_0 does: as SD3, the text first."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend; attention_mask is not read, as in diffusers."""
        qkv = _of_picture(attn, hidden_states)
        if encoder_hidden_states is None:
            return _out(attn, self.attend(qkv, scale=attn.scale))
        text = _of_text(attn, encoder_hidden_states)
        out = self.attend([torch.cat([b, a], dim=1) for a, b in zip(qkv, text)], scale=attn.scale)
        words, picture = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return _out(attn, picture), attn.to_add_out(words)


class Lumina2Attention(_Processor):
    """Do what Lumina2AttnProcessor2_0 does: fewer heads of k and v, rotary positions, a mask of the padding."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Tensor | None = None,
        base_sequence_length: int | None = None,
    ) -> Tensor:
        """Attend. attention_mask: (B, L), not 0 = keep."""
        q, k, v = attn.to_q(hidden_states), attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states)
        size, dtype = q.shape[-1] // attn.heads, q.dtype
        q, k, v = (split_heads(x, x.shape[-1] // size) for x in (q, k, v))
        q, k = _normed(q, attn.norm_q), _normed(k, attn.norm_k)
        if image_rotary_emb is not None:
            from diffusers.models.transformers import transformer_lumina2 as home

            q, k = (home.apply_rotary_emb(x, image_rotary_emb, use_real=False) for x in (q, k))
        scale = attn.scale
        if base_sequence_length is not None:
            scale *= math.sqrt(math.log(hidden_states.shape[1], base_sequence_length))
        mask = None if attention_mask is None else attention_mask.bool().view(q.shape[0], 1, 1, -1)
        return _out(attn, self.attend((q.to(dtype), k.to(dtype), v), mask, scale))


class HiDreamAttention(_Processor):
    """Do what HiDreamAttnProcessor does: norms over all heads, rotary positions over all or half of a head."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        hidden_states_masks: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        image_rotary_emb: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend. hidden_states_masks: (B, L), times k: padding is weighed down, not masked out."""
        from diffusers.models.transformers.transformer_hidream_image import apply_rope

        dtype = hidden_states.dtype
        q, k = attn.q_rms_norm(attn.to_q(hidden_states)), attn.k_rms_norm(attn.to_k(hidden_states))
        q, k, v = (split_heads(x, attn.heads) for x in (q.to(dtype), k.to(dtype), attn.to_v(hidden_states)))
        if hidden_states_masks is not None:
            k = k * hidden_states_masks.view(k.shape[0], -1, 1, 1)
        if not attn.single:
            words = encoder_hidden_states
            text = [attn.q_rms_norm_t(attn.to_q_t(words)), attn.k_rms_norm_t(attn.to_k_t(words)), attn.to_v_t(words)]
            text = [split_heads(x.to(dtype), attn.heads) for x in text]
            q, k, v = (torch.cat([a, b], dim=1) for a, b in zip((q, k, v), text))
        assert image_rotary_emb is not None
        if q.shape[-1] == 2 * image_rotary_emb.shape[-3]:
            q, k = apply_rope(q, k, image_rotary_emb)
        else:
            (q, q_rest), (k, k_rest) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
            q, k = apply_rope(q, k, image_rotary_emb)
            q, k = torch.cat([q, q_rest], dim=-1), torch.cat([k, k_rest], dim=-1)
        out = self.attend((q, k, v))
        if attn.single:
            return attn.to_out(out)
        picture, words = out.split([hidden_states.shape[1], out.shape[1] - hidden_states.shape[1]], dim=1)
        return attn.to_out(picture), attn.to_out_t(words)


class CosmosAttention(_Processor):
    """Do what CosmosAttnProcessor2_0 does: within the picture with rotary positions, or over the text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend. attention_mask: (B, 1, 1, L), not 0 = keep."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        projected = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        q, k, v = (split_heads(x, attn.heads) for x in projected)
        q, k = _normed(q, attn.norm_q), _normed(k, attn.norm_k)
        if image_rotary_emb is not None:
            from diffusers.models import embeddings

            rotate: Any = embeddings.apply_rotary_emb  # looked up here, since it may be patched
            q, k = (rotate(x, image_rotary_emb, use_real_unbind_dim=-2, sequence_dim=1) for x in (q, k))
        mask = None if attention_mask is None else attention_mask.bool()
        return _out(attn, self.attend((q.to(v.dtype), k.to(v.dtype), v), mask))


class MaskedJointAttention(_Processor):
    """Do what HunyuanVideo15AttnProcessor2_0 does: a clip with rotary positions, then the text, whose padding is no key.

    There padding asks nothing either, by a mask of the square of all tokens; nothing reads what it is told here.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Attend. attention_mask: (B, L) of the text, not 0 = keep."""
        from diffusers.models import embeddings

        rotate: Any = embeddings.apply_rotary_emb  # looked up here, since it may be patched
        q, k, v = _of_picture(attn, hidden_states)
        q, k = (rotate(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        both = [torch.cat(pair, dim=1) for pair in zip((q, k, v), _of_text(attn, encoder_hidden_states))]
        mask = torch.nn.functional.pad(attention_mask.bool(), (hidden_states.shape[1], 0), value=True)[:, None, None]
        picture, words = self.attend(both, mask).split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return _out(attn, picture), attn.to_add_out(words)


def _of_picture(attn: Any, x: Tensor) -> list[Tensor]:
    q, k, v = (split_heads(project(x), attn.heads) for project in (attn.to_q, attn.to_k, attn.to_v))
    return [_normed(q, attn.norm_q), _normed(k, attn.norm_k), v]


def _of_text(attn: Any, x: Tensor) -> list[Tensor]:
    q, k, v = (split_heads(project(x), attn.heads) for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
    return [_normed(q, attn.norm_added_q), _normed(k, attn.norm_added_k), v]


def _normed(x: Tensor, norm: Any) -> Tensor:
    return x if norm is None else norm(x)


def _out(attn: Any, x: Tensor) -> Tensor:
    return attn.to_out[1](attn.to_out[0](x))


# --- The attention function as a processor of diffusers' Attention modules: those of UNets and VAEs


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
        # the order of norms, masks and projections is that of diffusers' AttnProcessor
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
            split_heads(project(x), attn.heads).transpose(1, 2)
            for project, x in ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        )
        if attn.norm_q is not None:
            q = attn.norm_q(q)
        if attn.norm_k is not None:
            k = attn.norm_k(k)
        out = attention(q, k, v, keep, fused=self.fused).transpose(1, 2).flatten(2).to(q.dtype)

        # to_out holds the projection and its dropout
        out = attn.to_out[1](attn.to_out[0](out))
        if residual.ndim == 4:
            out = out.transpose(1, 2).reshape(residual.shape)
        if attn.residual_connection:
            out = out + residual
        return out / attn.rescale_output_factor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, N D) -> (B, L, N, D)."""
    return x.unflatten(-1, (heads, -1))


def _keep_mask(attn: Any, mask: Tensor | None, context: Tensor) -> Tensor | None:
    """Return diffusers' mask as bool, True = keep, of shape (B, 1 or N, 1 or S, L)."""
    if mask is None:
        return None
    batch, length = context.shape[:2]
    if mask.shape[0] == batch and mask.shape[-1] == length and mask.ndim <= 3:
        mask = mask.reshape(batch, 1, -1, length)  # one for all heads
    else:
        mask = attn.prepare_attention_mask(mask, length, batch)
        mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
    return mask if mask.dtype == torch.bool else mask > _DROPPED_BELOW


# diffusers' processors that do not ask its dispatcher, and what does the same. PAG and adapters of their own keep theirs.
_PLAIN = ("AttnProcessor", "AttnProcessor2_0", "AttnProcessorNPU", "XFormersAttnProcessor")
_OURS: dict[str, type[Any]] = {
    **dict.fromkeys(_PLAIN, AttentionProcessor),
    "JointAttnProcessor2_0": JointAttention,
    "XFormersJointAttnProcessor": JointAttention,
    "AuraFlowAttnProcessor2_0": AuraFlowAttention,
    "Lumina2AttnProcessor2_0": Lumina2Attention,
    "HiDreamAttnProcessor": HiDreamAttention,
    "CosmosAttnProcessor2_0": CosmosAttention,
    "HunyuanVideo15AttnProcessor2_0": MaskedJointAttention,
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


def share_tokens(root: nn.Module, share: TokenShare, names: Collection[str]) -> str:
    """Let modules of these names share the tokens that they attend over; return what is to be said of it.

    Their attention is set before. Raises ConfigFault where their heads cannot be dealt out, or they attend in another way.
    """
    modules = share.watch(root, names)
    if odd := next((module for module in modules if module.heads % share.size), None):
        what = f"is {share.size}, and {type(odd).__name__} has {odd.heads} heads, which ranks share"
        raise ConfigFault([Fault(option("training.sequence_parallel"), what, f"a divisor of {odd.heads}")])
    if other := next((module for module in modules if not calls_ours(getattr(module, "processor", None))), None):
        what = f"needs this library's attention function, and {type(other).__name__} calls another here"
        remedy = f"leave {option('training.attention', 'sdpa')} out"
        raise ConfigFault([Fault(option("training.sequence_parallel"), what, remedy)])
    return f"sequence: {share.size} ranks share the tokens of each sample, and the heads of {len(modules)} modules"


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
    requested = [option("training.fused_attention", True)] if fused else []
    if choice != "auto":
        requested.append(option("training.attention", choice))
    because = f" ({', '.join(requested)} asked for)" if requested else ""
    if not use_fused:
        return f"torch's scaled_dot_product_attention on {device.kind}{because}"
    if precision == "no" and not takes_fp32():
        return f"torch's scaled_dot_product_attention on npu in fp32, which this CANN does not fuse{because}"
    by_itself = "" if requested else f" (the default on npu; {option('training.attention', 'sdpa')} for torch's own)"
    return f"npu_fusion_attention where its limits allow{because or by_itself}"
