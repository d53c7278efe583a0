"""A transformer's pass as a row of blocks, any run of which may be on another device: what goes from one to the next.

Tensors of the pass go by name, in one order on every rank. What all micro batches of a shape share (sizes, rotary tables,
which names there are) is made once, where inputs enter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from difftrain.models import passes, repa, routing
from difftrain.models.passes import Tokens, Underway
from difftrain.models.routing import KEEP

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.contracts import Batch, Carry, Inputs
    from difftrain.models.root import DenoiserRoot

_IMAGE, _TEXT, _TEMB, _MORE, _WAITING = "image", "text", "temb", "more.", "waiting"
_TEXT_AFTER, _IMAGE_AFTER = "text_after.", "image_after."


@dataclass(frozen=True)
class PassLayout:
    """What all micro batches of a shape share. names: of the tokens' tensors. absent: of Tokens.more, where None is."""

    size: tuple[int, ...]
    rope: Any
    names: tuple[str, ...]
    absent: tuple[str, ...]
    keeps: bool
    aligns: bool


class Owners:
    """Which unit uses a weight of a root. leaving: pattern of the denoiser's weights that are used behind all units."""

    def __init__(self, root: DenoiserRoot, units: list[str], leaving: str) -> None:
        self._prefixes = [f"{name}." for name in units]
        self._leaving = re.compile(rf"{re.escape(root.part)}\.({leaving})|{repa.PROJECTOR}\.")

    def __call__(self, name: str) -> int:
        """Return the number of the unit; -1: what enters, as many as there are: what leaves."""
        for number, prefix in enumerate(self._prefixes):
            if name.startswith(prefix):
                return number
        return len(self._prefixes) if self._leaving.match(name) else -1


class TransformerChain:
    """The blocks of a transformer (see contracts.Chain)."""

    def __init__(self, root: DenoiserRoot) -> None:
        self._root, self._family = root, root.family
        self.units = [f"{root.part}.{name}" for name, _ in passes.blocks_of(root.family, root.denoiser)]
        self.owner = Owners(root, self.units, root.family.leaving)

    def kind(self, batch: Batch) -> Any:
        """Tell whether tokens of a batch pass blocks by, and whether they are aligned."""
        cfg = self._family.cfg
        return routing.places_of(cfg, batch) is not None, repa.is_on(cfg, batch)

    def enter(self, inputs: Inputs) -> tuple[Carry, PassLayout]:
        """Make tokens of inputs; text encoders that are trained run here."""
        root = self._root
        conditions = root.text(inputs.conditions)
        tokens = self._family.enter(root.denoiser, inputs.x_t, inputs.timestep, conditions)
        more = {f"{_MORE}{name}": value for name, value in tokens.more.items()}
        absent = tuple(name for name, value in more.items() if value is None)
        named = {_IMAGE: tokens.image, _TEXT: tokens.text, _TEMB: tokens.temb, **more}
        carry: Carry = {name: value for name, value in named.items() if value is not None}
        keeps = KEEP in conditions and root.span is not None
        layout = PassLayout(tokens.size, tokens.rope, tuple(carry), absent, keeps, repa.TERM in inputs.aux_targets)
        if keeps:
            carry[KEEP] = conditions[KEEP]
        return self._packed(passes.entered(tokens, self._plan(carry, layout)), carry, layout, 0), layout

    def names(self, layout: PassLayout, number: int) -> list[str]:
        """Name what arrives at unit `number`."""
        root, names = self._root, list(layout.names)
        if layout.keeps:
            names.append(KEEP)
            span = root.span
            if span is not None and span.last is not None and span.first <= number < span.last:
                names.append(_WAITING)
        if root.target_layer is not None and root.target_layer <= number:
            names.append(f"{_TEXT_AFTER}{root.target_layer}")
        if layout.aligns and root.align_layer <= number:
            names.append(f"{_IMAGE_AFTER}{root.align_layer}")
        return names

    def unit(self, number: int, carry: Carry, layout: PassLayout) -> Carry:
        """Run block `number`, counted from 0."""
        root, plan = self._root, self._plan(carry, layout)
        underway, block = self._unpacked(carry, layout), root.get_submodule(self.units[number])
        member = self.units[number].removeprefix(f"{root.part}.").rpartition(".")[0]
        underway = passes.passed(self._family, root.denoiser, number + 1, block, underway, plan, member)
        return self._packed(underway, carry, layout, number + 1)

    def leave(self, carry: Carry, layout: PassLayout) -> tuple[Tensor, ...]:
        """Turn what left the last block into the root's outputs."""
        root, plan = self._root, self._plan(carry, layout)
        out = passes.left(self._family, root.denoiser, self._unpacked(carry, layout), plan)
        return root.outputs(out, align=layout.aligns)

    def _plan(self, carry: Carry, layout: PassLayout) -> passes.PassPlan:
        return self._root.plan(carry.get(KEEP), align=layout.aligns)

    def _unpacked(self, carry: Carry, layout: PassLayout) -> Underway:
        def numbered(prefix: str) -> dict[int, Tensor]:
            return {int(name.removeprefix(prefix)): v for name, v in carry.items() if name.startswith(prefix)}

        more = dict.fromkeys(name.removeprefix(_MORE) for name in layout.absent)
        more |= {name.removeprefix(_MORE): value for name, value in carry.items() if name.startswith(_MORE)}
        tokens = Tokens(carry[_IMAGE], carry.get(_TEXT), carry[_TEMB], layout.size, layout.rope, more)
        return Underway(tokens, carry.get(_WAITING), numbered(_TEXT_AFTER), numbered(_IMAGE_AFTER))

    def _packed(self, underway: Underway, before: Carry, layout: PassLayout, number: int) -> Carry:
        """Name the tensors of a pass behind `number` blocks; the target of reconstructed text gets no gradient."""
        tokens, target = underway.tokens, self._root.target_layer
        carry: dict[str, Any] = {_IMAGE: tokens.image, _TEXT: tokens.text, _TEMB: tokens.temb}
        carry |= {f"{_MORE}{name}": value for name, value in tokens.more.items()}
        carry |= {KEEP: before.get(KEEP), _WAITING: underway.waiting}
        for behind, text in underway.text_after.items():
            carry[f"{_TEXT_AFTER}{behind}"] = text.detach() if behind == target else text
        carry |= {f"{_IMAGE_AFTER}{behind}": image for behind, image in underway.image_after.items()}
        return {name: value for name, value in carry.items() if value is not None}


def chain_of(root: nn.Module) -> TransformerChain:
    """Cut the pass of a root whose family lists its blocks."""
    made: Any = root
    return TransformerChain(made)
