"""The attention function as an attention implementation of transformers' models: the text encoders."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from difftrain.device import attention_calls
from difftrain.device.attend import attention

if TYPE_CHECKING:
    from torch import Tensor, nn

# As transformers knows them; the second keeps an NPU on SDPA.
_NAMES = {True: "difftrain", False: "difftrain_sdpa"}
_BESIDE = ("position_bias", "softcap", "cache")  # what only transformers' own implementation knows how to add


def set_attention(module: nn.Module, fused: bool) -> int:
    """Set the implementation of a transformers model; return how many of its modules attend, 0 for any other module."""
    if not callable(getattr(module, "set_attn_implementation", None)) or not _register():
        return 0
    model: Any = module
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
        AttentionInterface.register(name, functools.partial(_forward, fused=fused))
        AttentionMaskInterface.register(name, _mask)
    return True


def _forward(
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

        attention_calls.count(why)
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
