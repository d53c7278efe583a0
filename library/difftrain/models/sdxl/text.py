"""Text conditions of SDXL: hidden states of both encoders, by default the last but one, and the second's pooled output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.parts.prompt_weights import weigh

if TYPE_CHECKING:
    from torch import Tensor

CLIP_SKIP = 2  # SDXL's: hidden_states[-2]; 1 is the last layer's output, before its norm


def unused_names(encoder: Any, clip_skip: int = CLIP_SKIP) -> list[str]:
    """Name the parameters of the first encoder that can get no gradient: what comes after the states that are read.

    The second encoder has none: its pooled output goes through every layer.
    """
    layers = encoder.config.num_hidden_layers
    unused = (*(f"encoder.layers.{i}." for i in range(layers - clip_skip + 1, layers)), "final_layer_norm.")
    return [n for n, _ in encoder.named_parameters() if n.removeprefix("text_model.").startswith(unused)]


def encode_first(encoder: Any, input_ids: Tensor, weights: Tensor | None = None, clip_skip: int = CLIP_SKIP) -> Tensor:
    """Encode (B, N, 77) ids with CLIP-L: (B, 75 N + 2, D). weights (B, N, 77): of each token, where captions weigh."""
    return _states(_run(encoder, input_ids), input_ids.shape[1], weights, clip_skip)


def encode_second(
    encoder: Any, input_ids: Tensor, weights: Tensor | None = None, clip_skip: int = CLIP_SKIP
) -> tuple[Tensor, Tensor]:
    """Encode (B, N, 77) ids with bigG: (B, 75 N + 2, D), and the projected pooled state of the first chunk (B, P).

    Neither weights nor clip_skip change what is pooled.
    """
    num_chunks = input_ids.shape[1]
    out = _run(encoder, input_ids)
    return _states(out, num_chunks, weights, clip_skip), out.text_embeds[::num_chunks]


def _run(encoder: Any, input_ids: Tensor) -> Any:
    return encoder(input_ids.flatten(0, 1), output_hidden_states=True, return_dict=True)


def _states(out: Any, num_chunks: int, weights: Tensor | None, clip_skip: int) -> Tensor:
    states = join_chunks(out.hidden_states[-clip_skip], num_chunks)
    if weights is None:
        return states
    return weigh(states, join_chunks(weights.flatten(0, 1).unsqueeze(-1), num_chunks).squeeze(-1))


def join_chunks(states: Tensor, num_chunks: int) -> Tensor:
    """Join (B N, 77, D) to (B, 75 N + 2, D): the first BOS, the inner 75 of every chunk, the last end (kohya)."""
    if num_chunks == 1:
        return states
    states = states.unflatten(0, (-1, num_chunks))
    return torch.cat([states[:, 0, :1], states[:, :, 1:-1].flatten(1, 2), states[:, -1, -1:]], dim=1)
