"""Floating-point operations of a UNet and its text encoders, counted from the sizes.

torch's counter gives the same numbers (flops.py), but takes seconds to walk through a UNet, whose blocks all differ.
A matrix product or convolution of m outputs over k inputs each costs 2 m k; norms, activations and additions count
nothing. The backward pass of what is trained costs the same twice, for its inputs and for its weights; once where the
inputs need no gradient (the first layer, the time embeddings, keys and values of a frozen encoder's text). Activations
and scores computed again are not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from difftrain.models.text.clip_vocabulary import LENGTH

Config = Mapping[str, Any]


def flops(
    sizes: Mapping[str, Config], latent_hw: tuple[int, int], *, num_chunks: int, trained: Collection[str]
) -> float:
    """Count forward and backward of what is trained, for one sample (SDXL base at 1024 px: 20.2e12).

    sizes: of "unet", "text_encoder_1" and "text_encoder_2". Frozen encoders are left out, as published figures leave
    them out.
    """
    unet, context = sizes["unet"], (LENGTH - 2) * num_chunks + 2
    total = 3 * unet_flops(unet, latent_hw, context)
    total -= flops_without_input_gradient(unet, latent_hw, context, trained)
    if "text_encoder_1" in trained:
        config = sizes["text_encoder_1"]
        one_layer = text_flops({**config, "num_hidden_layers": 1}, num_chunks)  # the last has no part in the loss
        total += 3 * text_flops(config, num_chunks) - 2 * one_layer
    if "text_encoder_2" in trained:
        config = sizes["text_encoder_2"]
        projection = _linear(num_chunks, config["hidden_size"], config["projection_dim"])
        total += 3 * (text_flops(config, num_chunks) + projection)
    return float(total)


def text_flops(config: Config, num_chunks: int) -> int:
    """Count one caption through a CLIP text encoder, all layers."""
    width, inner, length = config["hidden_size"], config["intermediate_size"], LENGTH
    layer = _linear(length, width, width) * 4 + _linear(length, width, inner) * 2 + _attention(length, length, width)
    return int(config["num_hidden_layers"]) * layer * num_chunks


def unet_flops(config: Config, size_hw: tuple[int, int], context: int) -> int:
    """Count one latent through the UNet, with `context` text tokens."""
    widths, layers = config["block_out_channels"], config["layers_per_block"]
    depths = _per_block(config["transformer_layers_per_block"], len(widths))
    text, embedding = config["cross_attention_dim"], 4 * widths[0]
    h, w = size_hw
    total = _linear(1, widths[0], embedding) + _linear(1, embedding, embedding) * 2
    total += _linear(1, config["projection_class_embeddings_input_dim"], embedding)
    total += _conv(h, w, config["in_channels"], widths[0], 3)

    # --- down
    skips, entering = [(h, w, widths[0])], widths[0]
    for i, width in enumerate(widths):
        depth = depths[i] if "CrossAttn" in config["down_block_types"][i] else 0
        for _ in range(layers):
            total += _resnet(h, w, entering, width, embedding) + _transformer(h * w, width, depth, context, text)
            entering = width
            skips.append((h, w, width))
        if i < len(widths) - 1:
            h, w = -(-h // 2), -(-w // 2)
            total += _conv(h, w, width, width, 3)
            skips.append((h, w, width))

    # --- the middle
    total += 2 * _resnet(h, w, entering, entering, embedding)
    total += _transformer(h * w, entering, depths[-1], context, text)

    # --- up, beside what the way down has left
    for i, width in enumerate(reversed(widths)):
        depth = depths[-1 - i] if "CrossAttn" in config["up_block_types"][i] else 0
        for _ in range(layers + 1):
            h, w, skipped = skips.pop()
            total += _resnet(h, w, entering + skipped, width, embedding)
            total += _transformer(h * w, width, depth, context, text)
            entering = width
        if i < len(widths) - 1:
            total += _conv(skips[-1][0], skips[-1][1], width, width, 3)
    return total + _conv(h, w, widths[0], config["out_channels"], 3)


def flops_without_input_gradient(
    config: Config, size_hw: tuple[int, int], context: int, trained: Collection[str]
) -> int:
    """Count the forward pass of the UNet's layers whose inputs need no gradient."""
    widths, layers = config["block_out_channels"], config["layers_per_block"]
    total = _conv(*size_hw, config["in_channels"], widths[0], 3) + _linear(1, widths[0], 4 * widths[0])
    if "text_encoder_2" not in trained:  # whose pooled state goes in here
        total += _linear(1, config["projection_class_embeddings_input_dim"], 4 * widths[0])
    if set(trained) & {"text_encoder_1", "text_encoder_2"}:
        return total
    depths = _per_block(config["transformer_layers_per_block"], len(widths))
    sides = ((config["down_block_types"], widths, depths, layers),
             (config["up_block_types"], widths[::-1], depths[::-1], layers + 1))  # fmt: skip
    wide = widths[-1] * depths[-1]
    for kinds, side_widths, side_depths, repeats in sides:
        wide += sum(w * d * repeats for kind, w, d in zip(kinds, side_widths, side_depths) if "CrossAttn" in kind)
    return total + 2 * _linear(context, config["cross_attention_dim"], wide)


def _per_block(value: int | list[int], num_blocks: int) -> list[int]:
    return [value] * num_blocks if isinstance(value, int) else list(value)


def _conv(h: int, w: int, entering: int, leaving: int, kernel: int) -> int:
    return 2 * h * w * entering * leaving * kernel**2


def _linear(tokens: int, entering: int, leaving: int) -> int:
    return 2 * tokens * entering * leaving


def _attention(queries: int, keys: int, width: int) -> int:
    """Scores and their weighted sum: two products of queries x keys x width."""
    return 4 * queries * keys * width


def _resnet(h: int, w: int, entering: int, leaving: int, embedding: int = 0) -> int:
    shortcut = _conv(h, w, entering, leaving, 1) if entering != leaving else 0
    both = _conv(h, w, entering, leaving, 3) + _conv(h, w, leaving, leaving, 3)
    return both + shortcut + _linear(1, embedding, leaving)


def _transformer(tokens: int, width: int, depth: int, context: int, text: int) -> int:
    """Projections in and out, and per layer: self-attention, attention to the text, GEGLU of 4 x the width."""
    if not depth:
        return 0
    itself = _linear(tokens, width, width) * 4 + _attention(tokens, tokens, width)
    across = _linear(tokens, width, width) * 2 + _linear(context, text, width) * 2 + _attention(tokens, context, width)
    inner = _linear(tokens, width, 8 * width) + _linear(tokens, 4 * width, width)
    return 2 * _linear(tokens, width, width) + depth * (itself + across + inner)
