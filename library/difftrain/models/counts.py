"""Parameters of encoders, counted from their sizes by formula: no class is imported for it, as none may be here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def clip(config: Config, *, projected: bool = True) -> int:
    """Count a CLIP text encoder, with its projection or without."""
    d, inner = config["hidden_size"], config["intermediate_size"]
    layer = 4 * _linear(d, d) + _linear(d, inner) + _linear(inner, d) + 4 * d
    tables = (config["vocab_size"] + config.get("max_position_embeddings", 77)) * d
    return tables + config["num_hidden_layers"] * layer + 2 * d + (d * config["projection_dim"] if projected else 0)


def t5(config: Config) -> int:
    """Count T5's encoder: no biases, positions in the first layer alone."""
    d, attention = config["d_model"], config["num_heads"] * config["d_kv"]
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    layer = 4 * d * attention + (3 if gated else 2) * d * config["d_ff"] + 2 * d
    tables = config["vocab_size"] * d + config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    return tables + config["num_layers"] * layer + d


def vae(config: Config) -> int:
    """Count AutoencoderKL with attention in the middle, encoder and decoder."""
    widths, layers, latents = config["block_out_channels"], config["layers_per_block"], config["latent_channels"]
    middle = 2 * _resnet(widths[-1], widths[-1])
    if config.get("mid_block_add_attention", True):
        middle += 2 * widths[-1] + 4 * _linear(widths[-1], widths[-1])
    total = 2 * middle
    for side, repeats in ((list(widths), layers), (list(reversed(widths)), layers + 1)):
        entering = side[0]
        for i, width in enumerate(side):
            for _ in range(repeats):
                total += _resnet(entering, width)
                entering = width
            total += _conv(width, width, 3) if i < len(side) - 1 else 0
    total += _conv(config.get("in_channels", 3), widths[0], 3) + 2 * widths[-1] + _conv(widths[-1], 2 * latents, 3)
    total += _conv(latents, widths[-1], 3) + 2 * widths[0] + _conv(widths[0], config.get("out_channels", 3), 3)
    total += _conv(2 * latents, 2 * latents, 1) if config.get("use_quant_conv", True) else 0
    return total + (_conv(latents, latents, 1) if config.get("use_post_quant_conv", True) else 0)


def _linear(entering: int, leaving: int) -> int:
    return entering * leaving + leaving


def _conv(entering: int, leaving: int, kernel: int) -> int:
    return entering * leaving * kernel**2 + leaving


def _resnet(entering: int, leaving: int) -> int:
    shortcut = _conv(entering, leaving, 1) if entering != leaving else 0
    return 2 * entering + _conv(entering, leaving, 3) + 2 * leaving + _conv(leaving, leaving, 3) + shortcut
