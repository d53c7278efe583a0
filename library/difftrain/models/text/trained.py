"""Text encoders that are trained with the denoiser: what of them no loss reaches, and activations computed again."""

from __future__ import annotations

from typing import Any

from difftrain.models.facts import Text


def unread(text: Text, encoder: Any) -> list[str]:
    """Name the parameters of a CLIP encoder that can get no gradient: what comes after the states that are read.

    There are none where a vector is read too: it goes through every layer.
    """
    if text.pooled or not isinstance(text.hidden, int) or text.hidden >= 0:
        return []
    layers = encoder.config.num_hidden_layers
    unused = (*(f"encoder.layers.{i}." for i in range(layers + text.hidden + 1, layers)), "final_layer_norm.")
    return [name for name, _ in encoder.named_parameters() if name.removeprefix("text_model.").startswith(unused)]


def freeze_unread(text: Text, encoder: Any, reader: str) -> list[str]:
    """Freeze what no loss reaches; return the sentence that says so. reader: who reads the states before it."""
    names = unread(text, encoder)
    for name in names:
        encoder.get_parameter(name).requires_grad_(False)
    if not names or not isinstance(text.hidden, int):
        return []
    layers = encoder.config.num_hidden_layers
    first, last = layers + text.hidden + 1, layers - 1
    which = "" if first == layers else f"layer {first} and " if first == last else f"layers {first} to {last} and "
    return [
        f"{text.part}: {which}final_layer_norm ({len(names)} tensors) stay as they are, "
        f"because {reader} reads the hidden states before them"
    ]


def recompute(encoder: Any) -> None:
    """Compute activations again in the backward pass."""
    newer = getattr(encoder, "activation_checkpointing_enable", None)  # its name since transformers 5
    (newer or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
