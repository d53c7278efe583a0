"""The one module that holds everything trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from difftrain.models.sd3.forward import Plan, run
from difftrain.models.sd3.repa import nothing
from difftrain.models.sd3.routing import KEEP, Kept

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.sd3.routing import Span


class SD3Root(nn.Module):
    """The joint transformer. Conditions: tokens (B, L, J) and pooled (B, P), and in training "keep" (B, K).

    target_layer: where text is reconstructed, the number of the block whose text tokens are the target, 0 for those
    that enter the first block; then the last block has a text branch, and its tokens come beside the velocity.
    span: blocks that the tokens pass by which are not among those to keep. projector: of the picture tokens after
    align_layer, which are drawn towards an image encoder's.
    """

    transformer: Any
    projector: Any  # where there is an image encoder

    def __init__(
        self,
        transformer: nn.Module,
        *,
        target_layer: int | None = None,
        span: Span | None = None,
        projector: nn.Module | None = None,
        align_layer: int = 0,
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.target_layer = target_layer
        self.span = span
        self.align_layer = align_layer
        if projector is not None:
            self.projector = projector

    @property
    def num_blocks(self) -> int:
        return len(self.transformer.transformer_blocks)

    def plan(self, places: Tensor | None = None, *, align: bool = False) -> Plan:
        """Say what is needed of the pass. places: of the tokens to keep; None: all."""
        text = () if self.target_layer is None else (self.target_layer, self.num_blocks)
        kept = None if places is None or self.span is None else Kept(places, self.span)
        return Plan(text, (self.align_layer,) if align else (), kept)

    def forward(
        self, x_t: Tensor, timestep: Tensor, conditions: dict[str, Tensor], *, align: bool = False
    ) -> tuple[Tensor, ...]:
        """Predict. Shapes: x_t (B, C, H, W), timestep (B,) in 0..1000 -> velocity (B, C, H, W).

        Where text is reconstructed: also the text tokens after the last block and their target, (B, L, D). Where there
        is a projector, last: what it makes of the tokens to be aligned, (B, N, E), or a 0 that hangs on its weights.
        """
        plan = self.plan(conditions.get(KEEP), align=align)
        out = run(self.transformer, x_t, timestep, conditions["tokens"], conditions["pooled"], plan=plan)
        found = [out.velocity]
        if self.target_layer is not None:
            found += [out.text_after[self.num_blocks], out.text_after[self.target_layer].detach()]
        if align:
            found.append(self.projector(out.picture_after[self.align_layer]))
        elif hasattr(self, "projector"):
            found.append(nothing(self.projector))
        return tuple(found)
