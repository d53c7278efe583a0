"""Picture tokens that blocks are spared: TREAD's route around them, and patches that are masked for good.

Routed tokens wait and come back as they were (Krause et al. 2025, arXiv:2501.04765). Masked ones do not come back: the
first blocks see all patches, those behind them a share, and the loss is of that share (after Sehwag et al. 2024,
arXiv:2407.15811, whose mixer is a module of its own; here the transformer's first blocks are it, so an export is a
plain SD3). Both are of training alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from difftrain.contracts import DrawSpec, Fault

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.contracts import Batch

KEEP = "keep"  # the draw of what stays, and the condition that hands it to the root


@dataclass(frozen=True)
class BlockSpan:
    """Blocks that some tokens pass by, counted from 1. last None: they never come back."""

    first: int
    last: int | None = None

    def spares(self, block: int) -> bool:
        """Tell whether the tokens that leave a block are some of all."""
        return self.first <= block and (self.last is None or block < self.last)


@dataclass(frozen=True)
class Kept:
    """Tokens that go through the blocks of a span. Shape: places (B, K) int64."""

    places: Tensor
    span: BlockSpan


def chosen(tokens: Tensor, places: Tensor) -> Tensor:
    """Take tokens (B, N, D) at places (B, K): (B, K, D)."""
    return tokens.gather(1, places.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def returned(waiting: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """Put tokens (B, K, D) back at their places among those that waited, (B, N, D)."""
    where = places.unsqueeze(-1).expand(-1, -1, waiting.shape[-1])
    return waiting.scatter(1, where, tokens.to(waiting.dtype))


def patches_at(image: Tensor, places: Tensor, patch: int) -> Tensor:
    """Take the patches at places (B, K) out of (B, C, H, W), one below another: (B, C, K p, p)."""
    cells = image.unflatten(3, (-1, patch)).unflatten(2, (-1, patch)).permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, p, p)
    rows = cells.flatten(3).flatten(1, 2)  # (B, N, C p p)
    patches = chosen(rows, places).unflatten(2, (image.shape[1], patch, patch))
    return patches.transpose(1, 2).flatten(2, 3)


def span_of(cfg: TrainConfig, depth: int) -> BlockSpan | None:
    """Return which blocks are spared tokens. depth: of the transformer."""
    if cfg.patch_masking.share:
        return BlockSpan(cfg.patch_masking.mixer_layers + 1)
    if cfg.tread.share:
        return BlockSpan(cfg.tread.start, cfg.tread.end or max(cfg.tread.start, depth - 2))
    return None


def draws(cfg: TrainConfig, token: int) -> dict[str, DrawSpec]:
    """Ask for the tokens that stay. token: pixels along a token's side."""
    share = cfg.patch_masking.share or cfg.tread.share
    return {KEEP: DrawSpec("choice", factor=token, share=share, trains=True)} if share else {}


def places_of(cfg: TrainConfig, batch: Batch) -> Tensor | None:
    """Return the places of the tokens that stay, (B, K); None: all do, as in evaluation and once masking has ended."""
    return None if cfg.patch_masking.share and is_over(batch, cfg.patch_masking.until_step) else batch.draws.get(KEEP)


def is_over(batch: Batch, until: int | None) -> bool:
    """Tell whether what lasts for so many steps has ended with the one that a batch is for."""
    return until is not None and batch.step is not None and batch.step >= until


def faults(cfg: TrainConfig, depth: int) -> Iterator[Fault]:
    """Find blocks that are not there. depth: of the transformer."""
    span = span_of(cfg, depth)
    if span is None:
        return
    if cfg.patch_masking.share:
        if span.first > depth:
            what = f"{span.first - 1} leaves no block that sees fewer patches, the transformer has {depth}"
            yield Fault("--patch_masking.mixer_layers", what, f"1 to {depth - 1}")
    elif span.first > depth or (span.last or 0) > depth:
        name, value = ("start", span.first) if span.first > depth else ("end", span.last)
        yield Fault(f"--tread.{name}", f"is block {value}, the transformer has {depth}", f"1 to {depth}")
