"""The one module that holds everything trained: a denoiser under the name of its part, and what only training has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from difftrain.models import passes
from difftrain.models.repa import nothing
from difftrain.models.routing import KEEP, BlockSpan, Kept
from difftrain.models.text.encode import inputs_of, run

if TYPE_CHECKING:
    from torch import Tensor


class DenoiserRoot(nn.Module):
    """A denoiser, run by its family's pass. Conditions are the family's, and in training "keep" (B, K).

    encoders: text encoders that are trained with it; conditions hold the ids for these, in place of what they make.
    target_layer: where text is reconstructed, the number of the block whose text tokens are the target, 0 for those
    that enter the first block; then the last block's come beside the prediction. span: blocks that tokens pass by which
    are not to be kept. projector: of the image tokens after align_layer, which are drawn towards an image encoder's.
    """

    family: Any  # maths, no module
    projector: Any  # where there is an image encoder

    def __init__(
        self,
        family: Any,
        part: str,
        denoiser: nn.Module,
        *,
        encoders: Mapping[str, nn.Module] = MappingProxyType({}),
        target_layer: int | None = None,
        span: BlockSpan | None = None,
        projector: nn.Module | None = None,
        align_layer: int = 0,
    ) -> None:
        super().__init__()
        self.part = part
        self.target_layer, self.span, self.align_layer = target_layer, span, align_layer
        self.family = family
        self.add_module(part, denoiser)
        for name, encoder in encoders.items():
            self.add_module(name, encoder)
        if projector is not None:
            self.projector = projector

    @property
    def denoiser(self) -> Any:
        """Return the network that is trained."""
        return self.get_submodule(self.part)

    @property
    def num_blocks(self) -> int:
        """Count the blocks."""
        return sum(1 for _ in passes.blocks_of(self.family, self.denoiser))

    def text(self, conditions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the text encoders that are trained: what they make takes the place of what they read."""
        texts = self.family.texts
        for position, text in enumerate(texts, start=1):
            if f"input_ids_{position}" in conditions:
                made, read = run(texts, position, self.get_submodule(text.part), conditions), inputs_of(texts, position)
                conditions = {name: value for name, value in conditions.items() if name not in read} | made
        return conditions

    def plan(self, places: Tensor | None = None, *, align: bool = False) -> passes.PassPlan:
        """Say what is needed of the pass. places: of the tokens to keep; None: all."""
        text = () if self.target_layer is None else (self.target_layer, self.num_blocks)
        kept = None if places is None or self.span is None else Kept(places, self.span)
        return passes.PassPlan(text, (self.align_layer,) if align else (), kept)

    def forward(
        self, x_t: Tensor, timestep: Tensor, conditions: dict[str, Tensor], *, align: bool = False
    ) -> tuple[Tensor, ...]:
        """Predict. Shapes: x_t (B, C, [F,] H, W), timestep (B,) in 0..1000 -> velocity as x_t.

        Where text is reconstructed: also the text tokens after the last block and their target, (B, L, D). Where there
        is a projector, last: what it makes of the tokens to be aligned, (B, N, E), or a 0 that depends on its weights.
        """
        plan, conditions = self.plan(conditions.get(KEEP), align=align), self.text(conditions)
        return self.outputs(self.family.denoise(self.denoiser, x_t, timestep, conditions, plan), align=align)

    def outputs(self, out: passes.PassOutputs, *, align: bool) -> tuple[Tensor, ...]:
        """Turn what a pass makes into what `forward` returns."""
        made = [out.velocity]
        if self.target_layer is not None:
            made += [out.text_after[self.num_blocks], out.text_after[self.target_layer].detach()]
        if align:
            made.append(self.projector(out.image_after[self.align_layer]))
        elif hasattr(self, "projector"):
            made.append(nothing(self.projector))
        return tuple(made)
