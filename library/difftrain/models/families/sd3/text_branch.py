"""The last block's text branch: diffusers' SD3 has none, reconstructing the text needs one.

A whole last block modulates its text tokens six ways, the cut one only shifts and scales what its attention reads. The
velocity reads no more than that, so cutting a whole block leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from difftrain.device.quantised import Stored, widened
from difftrain.models.build import possible
from difftrain.models.weights.initial import initial_weights
from difftrain.models.weights.source import WeightSource

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.contracts import Fault

NORM = "norm1_context.linear."
BRANCH = ("attn.to_add_out.", "ff_context.")
Stream = Iterable[tuple[str, "Tensor"]]


@dataclass(frozen=True)
class BranchSource(WeightSource):
    """Where the weights of an SD3 come from whose last block may have its text branch.

    text_branch: it has. branchless: the stored transformer has not, so that its branch begins anew.
    """

    text_branch: bool = False
    branchless: bool = False

    @property
    def num_layers(self) -> int:
        """Count the joint blocks."""
        return int(self.sizes[self.denoiser]["num_layers"])

    def build(self, part: str) -> Any:
        """Build a part whose parameters have no memory. Raises ConfigFault for impossible sizes."""
        model = super().build(part)
        if part != self.denoiser or not self.text_branch:
            return model
        from diffusers.models.attention import JointTransformerBlock

        config, last = model.config, len(model.transformer_blocks) - 1
        with possible(part), torch.device("meta"):
            model.transformer_blocks[last] = JointTransformerBlock(
                dim=model.inner_dim,
                num_attention_heads=config.num_attention_heads,
                attention_head_dim=config.attention_head_dim,
                context_pre_only=False,
                qk_norm=config.qk_norm,
                use_dual_attention=last in config.dual_attention_layers,
            )
        return model

    def cut(self) -> Any:
        """Build the transformer as diffusers has it, without memory."""
        return super().build(self.denoiser)

    def faults(self, modules: Mapping[str, Any]) -> list[Fault]:
        """Compare stored parts with modules of them."""
        own = {self.denoiser: self.cut()} if self.branchless and self.denoiser in modules else {}
        return super().faults({**modules, **own})

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor | Stored]]:
        """Give a part's tensors one at a time; a branch that begins anew is drawn as in a model that is random as a whole."""
        if part != self.denoiser or not self.branchless:
            yield from super().weights(part, module)
            return
        scale, depth = self._scale(part, module), self.num_layers
        fresh = dict(initial_weights(module, part, self.seed, scale, only=lambda name: is_branch(name, depth)))
        yield from unfolded(widened(super().weights(part, self.cut())), depth, fresh)


def last_block(num_layers: int) -> str:
    """Return what the names of the last block's tensors begin with."""
    return f"transformer_blocks.{num_layers - 1}."


def is_branch(name: str, num_layers: int) -> bool:
    """Tell whether a tensor of a whole transformer is left out of the cut one."""
    prefix = last_block(num_layers)
    return name.startswith(tuple(prefix + name_part for name_part in BRANCH))


def folded(name: str, value: Tensor, num_layers: int) -> Tensor | None:
    """Turn a tensor of a whole transformer into diffusers', whose last block ends its text; None: it has no such one.

    AdaLayerNormZero's rows are shift, scale and gate of attention, then of the feed-forward; AdaLayerNormContinuous has
    scale before shift.
    """
    if name.startswith(last_block(num_layers) + NORM):
        shift, scale, *_ = value.chunk(6)
        return torch.cat((scale, shift))
    return None if is_branch(name, num_layers) else value


def unfolded(weights: Stream, num_layers: int, fresh: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Turn diffusers' weights into a whole transformer's: the same velocity, and a text branch that begins anew.

    fresh: what the branch begins with, by name. Its gates are zeros, so text leaves the block as it entered it.
    """
    norm = last_block(num_layers) + NORM
    for name, value in weights:
        if name.startswith(norm):
            scale, shift = value.chunk(2)
            yield name, torch.cat((shift, scale, *(torch.zeros_like(scale) for _ in range(4))))
        else:
            yield name, value
    yield from fresh.items()
