"""The pass through a transformer: how an image enters, passes one block after another, and leaves.

A family writes `enter`, `block` and `leave` over diffusers' own modules; `run` does the rest for all of them: it keeps
activations or recomputes them, routes tokens around blocks, hands out what is between blocks, and is cut into stages.
diffusers' own forward is the oracle: a pass gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.device import sequence
from difftrain.models.routing import Kept, chosen, returned

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.device.sequence import TokenShare


@dataclass(frozen=True)
class Tokens:
    """What goes from block to block. Shapes: image (B, N, D), text (B, L, D), temb (B, D) or (B, N, D).

    temb: of a network whose blocks take modulations of their own those that are left, (B, M, D).
    size: of the latents in tokens, ([F,] h, w). rope: positions, whatever the blocks take. more: what else they take.
    member: the list that the next block is of, where several lists have blocks of one kind.
    """

    image: Tensor
    text: Tensor | None
    temb: Tensor
    size: tuple[int, ...]
    rope: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    member: str = ""


class BlockLists(Protocol):
    """The lists of the denoiser, in the order in which they run."""

    blocks: tuple[str, ...]


class Blocks(BlockLists, Protocol):
    """What a family says of its pass."""

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens: ...
    def block(self, block: Any, tokens: Tokens) -> Tokens: ...
    def leave(self, net: Any, tokens: Tokens) -> Tensor: ...


@dataclass(frozen=True)
class PassPlan:
    """Say what of the pass is handed out beside its result, and which image tokens pass blocks by.

    text: numbers of blocks after which text tokens are, 0 = as they enter the first one. taps: those after which image
    tokens are, as many as there are then. Blocks are counted from 1.
    """

    text: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    kept: Kept | None = None


@dataclass
class PassOutputs:
    """What a pass makes. Shapes: velocity as x_t; text (B, L, D) and image tokens (B, N, D) by block.

    Where K tokens were kept for good the velocity is of their patches, one below another: (B, C, K p, p).
    """

    velocity: Tensor
    text_after: dict[int, Tensor] = field(default_factory=dict)
    image_after: dict[int, Tensor] = field(default_factory=dict)


_PLAIN = PassPlan()
KEEPS = "keeps_activations"  # attribute of a block that is not computed again where others are


def blocks_of(family: BlockLists, net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks in the order in which they run, by their names in the denoiser."""
    for member in family.blocks:
        yield from ((f"{member}.{name}", block) for name, block in net.get_submodule(member).named_children())


@dataclass(frozen=True)
class Underway:
    """A pass between two blocks. waiting: image tokens that pass blocks by; text_after, image_after: as PassOutputs has them."""

    tokens: Tokens
    waiting: Tensor | None = None
    text_after: dict[int, Tensor] = field(default_factory=dict)
    image_after: dict[int, Tensor] = field(default_factory=dict)


def run(
    family: Blocks, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor], plan: PassPlan = _PLAIN
) -> PassOutputs:
    """Predict. Shapes: x_t (B, C, [F,] H, W), t (B,) in 0..1000."""
    tokens, share = family.enter(net, x_t, t, conditions), sequence.active()
    underway = entered(tokens if share is None else own_tokens(family, tokens, share), plan)
    for number, (name, block) in enumerate(blocks_of(family, net), start=1):
        underway = passed(family, net, number, block, underway, plan, name.rpartition(".")[0])
    if share is not None:
        underway = replace(underway, tokens=replace(tokens, image=share.gathered(underway.tokens.image)))
    return left(family, net, underway, plan)


def own_tokens(family: Any, tokens: Tokens, share: TokenShare) -> Tokens:
    """Take this rank's run of the image tokens, with their positions and, where each has its own, times."""
    share.begin(tokens.image.shape[1])
    rope = None if tokens.rope is None else tuple(map(share.own, tokens.rope))
    temb = share.own(tokens.temb) if family.timed(tokens) else tokens.temb
    return replace(tokens, image=share.own(tokens.image), rope=rope, temb=temb)


def entered(tokens: Tokens, plan: PassPlan) -> Underway:
    """Begin a pass with the tokens that enter the first block."""
    return Underway(tokens, text_after={0: tokens.text} if 0 in plan.text and tokens.text is not None else {})


def passed(
    family: Blocks, net: Any, number: int, block: nn.Module, underway: Underway, plan: PassPlan, member: str
) -> Underway:
    """Run block `number`, counted from 1, of the list `member`."""
    tokens, kept, waiting = underway.tokens, plan.kept, underway.waiting
    if kept is not None and number == kept.span.first:
        # those that are masked for good are waited for by nobody
        waiting = None if kept.span.last is None else tokens.image
        tokens = replace(tokens, image=chosen(tokens.image, kept.places))
    tokens = through(family, net, block, replace(tokens, member=member))
    if kept is not None and number == kept.span.last and waiting is not None:
        tokens, waiting = replace(tokens, image=returned(waiting, kept.places, tokens.image)), None
    text_after, image_after = underway.text_after, underway.image_after
    if number in plan.text and tokens.text is not None:
        text_after = {**text_after, number: tokens.text}
    if number in plan.taps:
        image_after = {**image_after, number: tokens.image[:, : math.prod(tokens.size)]}  # without what fills up
    return Underway(tokens, waiting, text_after, image_after)


def left(family: Blocks, net: Any, underway: Underway, plan: PassPlan) -> PassOutputs:
    """End a pass behind the last block."""
    tokens = underway.tokens
    if plan.kept is not None and plan.kept.span.last is None:
        tokens = replace(tokens, size=(tokens.image.shape[1], 1))
    return PassOutputs(family.leave(net, tokens), underway.text_after, underway.image_after)


def through(family: Blocks, net: Any, block: nn.Module, tokens: Tokens) -> Tokens:
    """Run one block, keeping its activations or computing them again in the backward pass."""
    if not (torch.is_grad_enabled() and net.gradient_checkpointing) or getattr(block, KEEPS, False):
        return family.block(block, tokens)

    # what is computed again is kept by the checkpoint alone, which may let it wait on the host
    nothing: Any = None
    others = replace(tokens, image=nothing, text=None, temb=nothing)

    def again(image: Tensor, text: Tensor | None, temb: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        out = family.block(block, replace(others, image=image, text=text, temb=temb))
        return out.image, out.text, out.temb

    image, text, temb = net._gradient_checkpointing_func(again, tokens.image, tokens.text, tokens.temb)
    return replace(tokens, image=image, text=text, temb=temb)


def recompute_some(blocks: Sequence[nn.Module], count: int) -> None:
    """Let blocks keep their activations but for so many, evenly among all. Raises ConfigFault where there are fewer."""
    if count > len(blocks):
        what = f"is {count}, and the model has {len(blocks)} blocks"
        raise ConfigFault([Fault(option("training.checkpoint_blocks"), what, "leave it out for all")])
    again = {(2 * i + 1) * len(blocks) // (2 * count) for i in range(count)}
    for number, block in enumerate(blocks):
        if number not in again:
            setattr(block, KEEPS, True)
            module: Any
            for module in block.modules():  # of a UNet, whose blocks look at themselves
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = False


# ------------------------------------------------------------------ latents as tokens


def pack_channels_last(x: Tensor, patch: int) -> Tensor:
    """Lay patch x patch latent pixels into a token, channels fastest. Shapes: (B, C, h p, w p) -> (B, h w, p p C)."""
    x = x.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, h, p, w, p)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpack_channels_last(tokens: Tensor, patch: int, size: Sequence[int]) -> Tensor:
    """Undo pack_channels_last. size: (h, w) in tokens. Shapes: (B, h w, p p C) -> (B, C, h p, w p)."""
    x = tokens.unflatten(2, (patch, patch, -1)).unflatten(1, tuple(size))  # (B, h, w, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def pack(x: Tensor, patch: int) -> Tensor:
    """Lay patch x patch latent pixels into a token, channels slowest. Shapes: (B, C, h p, w p) -> (B, h w, C p p)."""
    x = x.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, h, p, w, p)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, patch: int, size: Sequence[int]) -> Tensor:
    """Undo pack. size: (h, w) in tokens. Shapes: (B, h w, C p p) -> (B, C, h p, w p)."""
    x = tokens.unflatten(1, tuple(size[-2:])).unflatten(3, (-1, patch, patch))  # (B, h, w, C, p, p)
    return x.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def packed(is_token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order slots so that what is a token comes first, each in its order. Shapes: is_token (B, S) bool.

    Returns order and back, (B, S): which one stands at a slot, and where it went; and which slots hold tokens. The host
    waits for no count.
    """
    total = is_token.sum(dim=1, keepdim=True)
    back = torch.where(is_token, is_token.cumsum(dim=1), total + (~is_token).cumsum(dim=1)) - 1
    slot = torch.arange(back.shape[1], device=back.device).expand_as(back)
    return torch.zeros_like(back).scatter(1, back, slot), back, slot < total


def laid(tokens: Tensor, order: Tensor) -> Tensor:
    """Lay tokens (B, S, D) in an order (B, S)."""
    return tokens.gather(1, order.unsqueeze(-1).expand_as(tokens))


def grid(height: int, width: int, *, axes: int = 3, first: int = 0) -> Tensor:
    """Say where tokens lie: (h w, axes) fp32 on the host; the last two axes are row and column, the first `first`."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.zeros(height * width, axes)
    places[:, 0] = first
    places[:, -2], places[:, -1] = rows.flatten(), columns.flatten()
    return places


def behind_text(places: Tensor, length: int) -> Tensor:
    """Put `length` text tokens, which have position 0 on all axes, before the image's."""
    return torch.cat((places.new_zeros(length, places.shape[1]), places))
