"""The attention function as a backend of diffusers' attention dispatcher, in the place of its own for NPUs.

Models that call `dispatch_attention_fn` (Flux, Wan, Qwen-Image, ...) name a backend in each processor. diffusers' own
for NPUs reads a float mask the wrong way round (issue 14397), drops is_causal, makes the host wait at every call that
has a mask, and cannot be trained with context parallelism. What stands here in its place runs on every device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from difftrain.device import attend
from difftrain.device.attend import attention, unfused
from difftrain.device.patches import PatchHook, Undo
from difftrain.device.sequence import exchanged

if TYPE_CHECKING:
    from torch import Tensor, nn


_MEMBER = "_NATIVE_NPU"


def backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Attend over (B, S, N, D), with the arguments that the dispatcher gives.

    attn_mask: bool, True = keep; integers, not 0 = keep; or float, added to the scores. As torch's SDPA broadcasts it,
    and (B, L) as well. Fewer heads of key and value than of query are found by their shapes.
    """
    if return_lse:
        raise ValueError("this attention gives no log-sum-exp, which ring attention needs; use Ulysses")
    mask = _broadcastable(attn_mask, query, key)
    if _parallel_config is None:
        return _attend(query, key, value, mask, dropout_p, is_causal, scale)
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention as in_parallel

    return in_parallel(
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
        forward_op=_forward, backward_op=_backward, _parallel_config=_parallel_config,
    )  # fmt: skip


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    share = exchanged()
    if share is not None:
        query, key, value = map(share.to_heads, (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if dropout > 0.0:
        out = unfused(q, k, v, mask, causal, scale, why="dropout inside attention", dropout=dropout)
    elif mask is not None and mask.dtype != torch.bool:
        out = unfused(q, k, v, mask, causal, scale, why="a mask that is added to the scores")
    else:
        out = attention(q, k, v, mask, causal, scale)
    return out.transpose(1, 2) if share is None else share.to_tokens(out.transpose(1, 2))


def _broadcastable(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        mask = mask != 0
    if mask.shape == (query.shape[0], key.shape[1]):  # of the keys' padding, also where S happens to be B
        return mask[:, None, None, :]
    return mask


def _forward(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Tensor:
    """Attend inside diffusers' context parallelism, which asks for a backward of its own."""
    if return_lse:
        raise ValueError("this attention gives no log-sum-exp, which ring attention needs; use Ulysses")
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
        ctx.remaining = (attn_mask, dropout_p, is_causal, scale)
    return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _backward(ctx: Any, grad_out: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Compute once more, with a graph: what a forward keeps for it would be held through a checkpointed block."""
    tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
    with torch.enable_grad():
        query, key, value = tensors
        out = _attend(query, key, value, *ctx.remaining)
    return torch.autograd.grad(out, tensors, grad_out)


def _faulty() -> bool:
    """Tell whether diffusers' own backend for NPUs drops is_causal or reads a float mask the wrong way round."""
    import inspect

    from diffusers.models import attention_dispatch as home

    member = getattr(home.AttentionBackendName, _MEMBER, None)
    if member is None:
        return False
    if "is_causal" not in inspect.signature(home._AttentionBackendRegistry._backends[member]).parameters:
        return True
    turn = getattr(home, "_maybe_modify_attn_mask_npu", None)
    if turn is None:
        return False
    x = torch.zeros(1, 2, 1, 8)
    out = turn(x, x, torch.tensor([[[[0.0, -1e4]]]]))
    return out is None or (out.dtype == torch.bool and bool(out[..., 0].any()))


def _put() -> Undo:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    member = getattr(AttentionBackendName, _MEMBER)
    tables = (
        _AttentionBackendRegistry._backends,
        _AttentionBackendRegistry._constraints,
        _AttentionBackendRegistry._supported_arg_names,
    )
    before = [table[member] for table in tables]
    parallel = member.value in _AttentionBackendRegistry._supports_context_parallel
    _AttentionBackendRegistry.register(member, supports_context_parallel=True)(backend)

    def undo() -> None:
        for table, was in zip(tables, before):
            table[member] = was
        if not parallel:
            _AttentionBackendRegistry._supports_context_parallel.discard(member.value)

    return undo


NATIVE_NPU = PatchHook(_faulty, _put)


def name_backend(processor: Any, ours: bool, on_npu: bool) -> bool:
    """Let a processor of a dispatcher model call the backend above, or the one that is active; tell whether it can.

    Where diffusers' own is without fault and stands in its place, it is called on an NPU alone.
    """
    if not hasattr(processor, "_attention_backend"):
        return False
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    member = getattr(AttentionBackendName, _MEMBER, None)
    if member is None:  # a version that has no such name
        return False
    ours = ours and (on_npu or _AttentionBackendRegistry._backends[member] is backend)
    if ours or processor._attention_backend == member:
        processor._attention_backend = member if ours else None
    return True


def calls_ours(processor: Any) -> bool:
    """Tell whether a processor calls the backend above."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    member = getattr(AttentionBackendName, _MEMBER, None)
    named = member is not None and getattr(processor, "_attention_backend", None) == member
    return named and _AttentionBackendRegistry._backends[member] is backend


# --- The attention function as an attention implementation of transformers' models: the text encoders


# As transformers knows them; the second keeps an NPU on SDPA.
_NAMES = {True: "difftrain", False: "difftrain_sdpa"}
_BESIDE = ("position_bias", "softcap", "cache")  # what only transformers' own implementation knows how to add


def set_attention(module: nn.Module, fused: bool) -> int:
    """Set the implementation of a transformers model; return how many of its modules attend, 0 for any other module."""
    if not callable(getattr(module, "set_attn_implementation", None)) or not _register():
        return 0
    model: Any = module
    if not getattr(model, "_supports_sdpa", True):  # its scores are capped, which no fused operator does: Gemma 2
        return 0
    model.set_attn_implementation(_NAMES[fused])
    if model.config._attn_implementation != _NAMES[fused]:  # a model that has one way only
        return 0
    return sum(type(part).__name__.endswith("Attention") for part in model.modules())


@functools.cache
def _register() -> bool:
    """Make both names known to transformers; before version 4.53 it has no place for a mask function, and we none."""
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError:
        return False
    for fused, name in _NAMES.items():
        AttentionInterface.register(name, functools.partial(_encoder_forward, fused=fused))
        AttentionMaskInterface.register(name, _mask)
    return True


def _encoder_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    fused: bool,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over (B, N, S, D); return (B, S, N, D), as transformers wants it."""
    why = _why_not_ours(attention_mask, dropout, kwargs)
    if why:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attend.count(why)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A mask holds the causal part already; one query alone stands after all keys, not before them.
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    out = attention(query, key, value, attention_mask, causal, scaling, fused=fused)
    return out.transpose(1, 2).contiguous(), None


def _why_not_ours(mask: Tensor | None, dropout: float, beside: dict[str, Any]) -> str:
    if dropout > 0.0:
        return "dropout inside attention"
    if mask is not None and mask.dtype != torch.bool:
        return "a mask that is added to the scores"
    return next((f"a {name.replace('_', ' ')}" for name in _BESIDE if beside.get(name) is not None), "")


def _mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Make a bool mask (B, 1, S, L), True = keep, or none at all where there is no padding to mask.

    transformers' own looks into a padding mask whether it keeps all, for which the host waits for the device.
    """
    from transformers.masking_utils import sdpa_mask

    if attention_mask is not None:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(attention_mask=attention_mask, **kwargs)
