"""Text conditions of SDXL: the penultimate hidden states of both encoders, and the pooled output of the second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

# hidden_states[-2] is taken of CLIP-L, so its last layer and final norm have no part in the loss
UNUSED_OF_FIRST = ("final_layer_norm.",)


def unused_names(encoder: Any) -> list[str]:
    """Name the parameters of the first encoder that can get no gradient."""
    last = encoder.config.num_hidden_layers - 1
    unused = (f"encoder.layers.{last}.", *UNUSED_OF_FIRST)
    return [n for n, _ in encoder.named_parameters() if n.removeprefix("text_model.").startswith(unused)]


def encode_first(encoder: Any, input_ids: Tensor) -> Tensor:
    """Encode (B, N, 77) ids with CLIP-L: (B, 75 N + 2, D)."""
    return join_chunks(_run(encoder, input_ids).hidden_states[-2], input_ids.shape[1])


def encode_second(encoder: Any, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Encode (B, N, 77) ids with bigG: (B, 75 N + 2, D), and the projected pooled state of the first chunk (B, P)."""
    num_chunks = input_ids.shape[1]
    out = _run(encoder, input_ids)
    return join_chunks(out.hidden_states[-2], num_chunks), out.text_embeds[::num_chunks]


def _run(encoder: Any, input_ids: Tensor) -> Any:
    return encoder(input_ids.flatten(0, 1), output_hidden_states=True, return_dict=True)


def join_chunks(states: Tensor, num_chunks: int) -> Tensor:
    """Join (B N, 77, D) to (B, 75 N + 2, D): the first BOS, the inner 75 of every chunk, the last end (kohya)."""
    if num_chunks == 1:
        return states
    states = states.unflatten(0, (-1, num_chunks))
    return torch.cat([states[:, 0, :1], states[:, :, 1:-1].flatten(1, 2), states[:, -1, -1:]], dim=1)
