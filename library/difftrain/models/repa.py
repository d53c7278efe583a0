"""REPA: hidden picture tokens are drawn towards those of a frozen image encoder (Yu et al. 2024, arXiv:2410.06940).

The term is 1 - cos, the mean over tokens, of projected tokens after one block and the encoder's for the clean picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from difftrain.contracts import METRIC, Fault
from difftrain.models.routing import chosen, is_over
from difftrain.models.weights.initial import by_fan_in, initial_weights

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.contracts import Batch, Inputs
    from difftrain.models.routing import BlockSpan

TERM, PROJECTOR = "repa", "projector"
_SMALLEST = 1e-6


def projector(width: int, hidden: int, leaving: int) -> nn.Sequential:
    """Build the three layers that turn tokens of the transformer into some of the encoder, on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, leaving)
        )


def weights(module: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield random weights of the projector, the same on every machine."""
    return initial_weights(module, PROJECTOR, seed, by_fan_in)


def is_on(cfg: TrainConfig, batch: Batch) -> bool:
    """Tell whether a batch is aligned: in training, until its step."""
    return cfg.repa.encoder is not None and batch.step is not None and not is_over(batch, cfg.repa.until_step)


def target_tokens(features: Tensor, places: Tensor | None, layer: int, span: BlockSpan | None) -> Tensor:
    """Make the encoder's tokens (B, N, E) of (B, E, h, w); where the layer sees some of them, (B, K, E) at its places."""
    tokens = features.float().flatten(2).transpose(1, 2)
    spared = places is not None and span is not None and span.spares(layer)
    return chosen(tokens, places) if spared and places is not None else tokens


def nothing(module: nn.Sequential) -> Tensor:
    """Return 0 that hangs on every weight: a rank whose gradients are reduced must have all of them.

    By the module's own forward: where ZeRO has taken weights apart, that is what puts them together.
    """
    first: Any = module[0]
    token = torch.zeros(1, first.in_features, dtype=first.weight.dtype, device=first.weight.device)
    return module(token).float().sum() * 0.0


def distances(projected: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - cos of tokens and their targets, each sample's mean. Shapes: (B, N, E) both -> (B,) fp32."""
    return 1.0 - torch.cosine_similarity(projected.float(), targets.float(), dim=-1, eps=_SMALLEST).mean(1)


def with_term(losses: Mapping[str, Tensor], projected: Tensor, inputs: Inputs, weight: float) -> dict[str, Tensor]:
    """Add the term to the others; a loss that stood alone becomes a term by its name. 0 where nothing is aligned.

    Then nothing is measured either.
    """
    terms = {("denoise" if name == "loss" else name): value for name, value in losses.items()}
    targets = inputs.aux_targets.get(TERM)
    total = projected if targets is None else (inputs.weight * distances(projected, targets)).sum()
    measured = torch.full_like(total, torch.nan) if targets is None else total
    return {**terms, TERM: weight * total, f"{METRIC}{TERM}_loss": measured}


def faults(cfg: TrainConfig, depth: int) -> Iterator[Fault]:
    """Find a layer that is not there. depth: of the transformer."""
    if cfg.repa.encoder is not None and cfg.repa.layer > depth:
        yield Fault("--repa.layer", f"is block {cfg.repa.layer}, the transformer has {depth}", f"1 to {depth}")
