"""Rotary embeddings by real numbers, in modules of diffusers that multiply by complex ones.

An NPU has few kernels for complex numbers. Who makes positions makes real tables of the complex ones on the host
(fused_layers.real_tables), and modules that are given those rotate by them. Complex tables are multiplied by as
upstream does it, so that its own forward is what it was. `apply_rotary_emb` is patched for this too: fused_layers.ROTARY.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.device.fused_layers import rotate_pairs
from difftrain.device.patches import PatchHook, Undo

if TYPE_CHECKING:
    from torch import Tensor

_COMPLEX = "view_as_complex"


# ------------------------------------------------------------------ text and image with tables of their own


def _is_complex_of_two() -> bool:
    """Tell whether the function, as it came, takes a tuple as a complex table."""
    from diffusers.models.transformers import transformer_qwenimage as home

    return _COMPLEX in home.apply_rotary_emb_qwen.__code__.co_names


def _put_two() -> Undo:
    from diffusers.models.transformers import transformer_qwenimage

    home: Any = transformer_qwenimage
    upstream = home.apply_rotary_emb_qwen

    def rotated(x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1) -> Any:
        if not use_real and isinstance(freqs_cis, tuple):
            return rotate_pairs(x, freqs_cis)
        return upstream(x, freqs_cis, use_real, use_real_unbind_dim)

    home.apply_rotary_emb_qwen = rotated

    def undo() -> None:
        home.apply_rotary_emb_qwen = upstream

    return undo


TEXT_AND_IMAGE = PatchHook(_is_complex_of_two, _put_two)


# ------------------------------------------------------------------ one stream of both


def _is_complex_of_one() -> bool:
    """Tell whether the processor, as it came, has a function inside that makes complex numbers."""
    from diffusers.models.transformers import transformer_z_image as home

    code = home.ZSingleStreamAttnProcessor.__call__.__code__
    inner = [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    return any(_COMPLEX in function.co_names for function in (code, *inner))


def _put_one() -> Undo:
    from diffusers.models.transformers import transformer_z_image as home

    kind: Any = home.ZSingleStreamAttnProcessor
    upstream = kind.__call__

    def attended(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Any = None,
    ) -> Tensor:
        """Attend. Shapes: hidden_states (B, S, D), attention_mask (B, S) bool; freqs_cis: see rotate_pairs."""
        if not isinstance(freqs_cis, tuple):
            return upstream(self, attn, hidden_states, encoder_hidden_states, attention_mask, freqs_cis)
        q, k, v = (
            project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        q, k = (x if norm is None else norm(x) for x, norm in ((q, attn.norm_q), (k, attn.norm_k)))
        q, k = rotate_pairs(q, freqs_cis), rotate_pairs(k, freqs_cis)
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        out = home.dispatch_attention_fn(
            q, k, v, attn_mask=attention_mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        out = out.flatten(2, 3).to(q.dtype)
        for layer in attn.to_out:  # the projection, and its dropout
            out = layer(out)
        return out

    kind.__call__ = attended

    def undo() -> None:
        kind.__call__ = upstream

    return undo


ONE_STREAM = PatchHook(_is_complex_of_one, _put_one)


# ------------------------------------------------------------------ fewer heads of keys and values


def _has_complex_tables() -> bool:
    from diffusers.models.transformers.transformer_lumina2 import Lumina2RotaryPosEmbed

    return Lumina2RotaryPosEmbed(10000, [4], [2]).freqs_cis[0].is_complex()


def _put_real_pairs() -> Undo:
    """Lay a cosine and a sine, side by side, where a complex number is: fp32 of tables made in fp64, on the host."""
    from diffusers.models import embeddings
    from diffusers.models.transformers import transformer_lumina2

    home: Any = transformer_lumina2
    embed = home.Lumina2RotaryPosEmbed
    complex_of, upstream = embed._precompute_freqs_cis, home.apply_rotary_emb

    def precompute(self: Any, *args: Any) -> list[Tensor]:
        return [torch.view_as_real(table).flatten(-2).float() for table in complex_of(self, *args)]

    def rotated(x: Tensor, freqs_cis: Any, use_real: bool = True, *args: Any, **options: Any) -> Any:
        if not use_real and isinstance(freqs_cis, torch.Tensor) and not freqs_cis.is_complex():
            return rotate_pairs(x, tables_of_pairs(freqs_cis))
        return embeddings.apply_rotary_emb(x, freqs_cis, use_real, *args, **options)

    embed._precompute_freqs_cis, home.apply_rotary_emb = precompute, rotated

    def undo() -> None:
        embed._precompute_freqs_cis, home.apply_rotary_emb = complex_of, upstream

    return undo


def tables_of_pairs(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, as fused_layers.real_tables, of both side by side. Shapes: (..., D) -> (..., D) each."""
    cos, sin = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


GROUPED = PatchHook(_has_complex_tables, _put_real_pairs)
