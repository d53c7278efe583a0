"""Sequence parallelism: ranks share the tokens of each sample, and attention shares its heads (Ulysses).

A rank has a run of the tokens. Where a module attends over all of them, each rank gives every other its tokens of some
heads and gets all tokens of its own: one all-to-all before, one behind. Everything else in a block is of single tokens.
Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor, nn


class TokenShare:
    """Ranks of a process group that share the tokens of a sample, in the order of their ranks, as evenly as may be."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.lengths: list[int] = []  # tokens of each rank, of the sample at hand
        self.attends = False  # a module that attends over all of them runs
        self.exchanges = 0

    @classmethod
    def among(cls, size: int, rank: int, world: int, timeout_min: float | None) -> TokenShare | None:
        """Let so many ranks that follow one another share tokens; None: one alone. All ranks call it."""
        if size == 1:
            return None
        timeout = None if timeout_min is None else timedelta(minutes=timeout_min)
        groups = [dist.new_group(list(range(first, first + size)), timeout=timeout) for first in range(0, world, size)]
        return cls(groups[rank // size])

    def begin(self, tokens: int) -> None:
        """Begin a pass over samples of so many tokens. Raises ValueError where there are too few."""
        if tokens < self.size:
            raise ValueError(f"{tokens} tokens of a sample cannot be shared by {self.size} ranks")
        self.lengths = [(tokens * (rank + 1)) // self.size - (tokens * rank) // self.size for rank in range(self.size)]

    def own(self, tokens: Tensor) -> Tensor:
        """Return this rank's run of tokens. Shapes: (B, N, ...) -> (B, n, ...)."""
        return tokens.narrow(1, sum(self.lengths[: self.rank]), self.lengths[self.rank])

    def gathered(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks. Shapes: (B, n, ...) -> (B, N, ...).

        What follows is the same on every rank, and each ends with its share of the loss: the gradient of a rank's tokens
        is the sum of as many equal ones.
        """
        return _Gather.apply(tokens, self, tuple(self.lengths))  # type: ignore[no-any-return]

    def to_heads(self, x: Tensor) -> Tensor:
        """Give tokens, get heads. Shapes: (B, n, heads, D) -> (B, N, heads / ranks, D)."""
        self.exchanges += 1
        return _Exchange.apply(x, self, tuple(self.lengths), True)  # type: ignore[no-any-return]

    def to_tokens(self, x: Tensor) -> Tensor:
        """Undo to_heads. Shapes: (B, N, heads / ranks, D) -> (B, n, heads, D)."""
        return _Exchange.apply(x, self, tuple(self.lengths), False)  # type: ignore[no-any-return]

    def watch(self, root: nn.Module, names: Collection[str]) -> list[Any]:
        """Know when modules of these names run, which attend over all tokens; return them."""
        modules = [module for name, module in root.named_modules() if name.rpartition(".")[2] in names]
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)
        return modules

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.attends, self._before = _active is self, self.exchanges

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        asked, self.attends = self.attends, False
        if asked and output is not None and self.exchanges == self._before:
            raise RuntimeError(f"{type(module).__name__} attends in a way that does not share tokens")


_active: TokenShare | None = None  # of the process: the backward pass runs on threads of its own


@contextmanager
def sharing(share: TokenShare | None) -> Iterator[None]:
    """Share the tokens of what runs forward and backward meanwhile; None: nothing is shared."""
    global _active
    before, _active = _active, share
    try:
        yield
    finally:
        _active = before


def active() -> TokenShare | None:
    """Return who shares the tokens of a pass that begins now."""
    return _active


def exchanged() -> TokenShare | None:
    """Return who shares the tokens that are attended over now; None: a rank has all of them."""
    return _active if _active is not None and _active.attends else None


def _sent(pieces: Tensor, to: list[int], received: list[int], share: TokenShare) -> Tensor:
    """Send rows to all ranks and receive theirs. to, received: how many, of each rank."""
    out = pieces.new_empty((sum(received), *pieces.shape[1:]))
    dist.all_to_all_single(out, pieces.contiguous(), received, to, group=share.group)
    return out


def _tokens_to_heads(x: Tensor, share: TokenShare, lengths: tuple[int, ...]) -> Tensor:
    own = x.shape[1]
    pieces = x.unflatten(2, (share.size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)  # (ranks n, B, h, D)
    return _sent(pieces, [own] * share.size, list(lengths), share).transpose(0, 1).contiguous()


def _heads_to_tokens(x: Tensor, share: TokenShare, lengths: tuple[int, ...]) -> Tensor:
    own = lengths[share.rank]
    pieces = _sent(x.transpose(0, 1), list(lengths), [own] * share.size, share)
    return pieces.unflatten(0, (share.size, own)).permute(2, 1, 0, 3, 4).flatten(2, 3)  # (B, n, ranks h, D)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: TokenShare, lengths: tuple[int, ...], to_heads: bool) -> Tensor:
        ctx.facts = share, lengths, to_heads
        return (_tokens_to_heads if to_heads else _heads_to_tokens)(x, share, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        share, lengths, to_heads = ctx.facts
        return (_heads_to_tokens if to_heads else _tokens_to_heads)(gradients[0], share, lengths), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: TokenShare, lengths: tuple[int, ...]) -> Tensor:
        ctx.facts = share, lengths
        own = x.shape[1]
        rows = x.transpose(0, 1).repeat(share.size, *(1,) * (x.ndim - 1))
        return _sent(rows, [own] * share.size, list(lengths), share).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        share, lengths = ctx.facts
        start = sum(lengths[: share.rank])
        return gradients[0].narrow(1, start, lengths[share.rank]) * share.size, None, None
