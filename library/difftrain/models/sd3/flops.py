"""Floating-point operations of one SD3 sample, counted from the sizes.

A matrix product of m outputs over k inputs each costs 2 m k; norms, activations and additions count nothing. The
backward pass costs the same twice, for inputs and for weights; once where the inputs need no gradient: patches, time,
pooled text and tokens as they come in. Recomputed activations are not counted, nor the heads of a last block whose text
goes nowhere. torch.utils.flop_counter gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from difftrain.contracts import Bucket
from difftrain.models.sd3.architecture import Architecture

if TYPE_CHECKING:
    from difftrain.models.sd3.routing import Span

TIME = 256  # channels of diffusers' sines of the time
Config = dict[str, Any]


@dataclass(frozen=True)
class Spared:
    """Say that of all picture tokens so many go through the blocks of a span."""

    span: Span
    kept: int

    def within(self, block: int) -> bool:
        """Tell whether a block sees some of all, counted from 1."""
        return self.span.first <= block and (self.span.last is None or block <= self.span.last)


@dataclass(frozen=True)
class Projector:
    """Say what is aligned with an image encoder's tokens: those after a block, through three layers."""

    layer: int
    hidden: int
    leaving: int


def flops_per_sample(
    architecture: Architecture,
    bucket: Bucket,
    t5_length: int,
    spared: Spared | None = None,
    projector: Projector | None = None,
) -> float:
    """Count forward and backward of one sample of a bucket (SD3-Light at 256 px: 1.57e12).

    Frozen encoders are left out, as published figures leave them out; the cache holds what they make. What lasts for
    some steps only (spared, projector) is counted as in those.
    """
    size = architecture.size_multiple
    picture, words = (bucket.height // size) * (bucket.width // size), architecture.clip_length + t5_length
    forward = transformer_flops(architecture, picture, words, spared)
    if projector is not None:
        d, few = _width(architecture.transformer), spared is not None and spared.span.spares(projector.layer)
        tokens = spared.kept if few and spared is not None else picture
        forward += sum(
            _linear(tokens, *sides)
            for sides in ((d, projector.hidden), (projector.hidden,) * 2, (projector.hidden, projector.leaving))
        )
    return float(3 * forward - entering_flops(architecture, picture, words))


def transformer_flops(architecture: Architecture, picture: int, words: int, spared: Spared | None = None) -> int:
    """Count the forward pass over so many picture and text tokens."""
    config, d = architecture.transformer, _width(architecture.transformer)
    dual = config.get("dual_attention_layers") or ()
    total = entering_flops(architecture, picture, words) + 2 * _linear(1, d, d)  # and the second layers of the time
    for block in range(config["num_layers"]):
        ends = block == config["num_layers"] - 1 and not architecture.text_branch
        tokens = spared.kept if spared is not None and spared.within(block + 1) else picture
        total += block_flops(d, tokens, words, ends=ends, dual=block in dual)
    patch = config["patch_size"] ** 2 * config["out_channels"]
    leaving = spared.kept if spared is not None and spared.span.last is None else picture
    return total + _linear(1, d, 2 * d) + _linear(leaving, d, patch)


def block_flops(d: int, picture: int, words: int, *, ends: bool = False, dual: bool = False) -> int:
    """Count a joint block. ends: its text goes nowhere after its attention. dual: the picture attends to itself too."""
    together = picture + words
    modulation = _linear(1, d, (9 if dual else 6) * d) + _linear(1, d, (2 if ends else 6) * d)
    attention = _linear(together, d, 3 * d) + _attention(together, d) + _linear(picture if ends else together, d, d)
    if dual:
        attention += _linear(picture, d, 4 * d) + _attention(picture, d)
    return modulation + attention + 2 * _linear(picture if ends else together, d, 4 * d)


def entering_flops(architecture: Architecture, picture: int, words: int) -> int:
    """Count the layers whose inputs need no gradient."""
    config, d = architecture.transformer, _width(architecture.transformer)
    patches = _linear(picture, config["patch_size"] ** 2 * config["in_channels"], d)
    text = _linear(words, config["joint_attention_dim"], config["caption_projection_dim"])
    return patches + text + _linear(1, TIME, d) + _linear(1, config["pooled_projection_dim"], d)


def _width(config: Config) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def _linear(tokens: int, entering: int, leaving: int) -> int:
    return 2 * tokens * entering * leaving


def _attention(tokens: int, width: int) -> int:
    """Scores and their weighted sum: two products of tokens x tokens x width."""
    return 4 * tokens * tokens * width
