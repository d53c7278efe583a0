"""The first module that made a value that is no number: found by running a step that was skipped once more, with hooks.

The k-th global batch, its draws and the seeds of dropout are functions of k, so the step can be made again when its numbers
are read, on every rank its own share, without a word between them until all have looked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from difftrain.contracts.errors import DifftrainError
from difftrain.report.compare.parting import ROOT, ModuleCall, Parting, first_parting
from difftrain.train.diagnosis.module_calls import ModuleCalls

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.contracts import Batch
    from difftrain.distributed.ranks import Ranks
    from difftrain.train.state import TrainedModel

log = logging.getLogger("difftrain")
EVERY = 100  # steps from one search to the next: a run that skips often is slowed by a hundredth at most


class NonFinite:
    """Search for the origin of a non-finite loss or gradient. Collective: every rank asks of the same steps.

    batches: loads this rank's micro batches of a step, by its number from 1.
    """

    def __init__(
        self, model: TrainedModel, ranks: Ranks, batches: Callable[[int], list[Batch]], samples: Callable[[int], int]
    ) -> None:
        self._model, self._ranks, self._batches, self._samples = model, ranks, batches, samples
        self._searched: int | None = None

    def __call__(self, step: int, *, skipped: int, updated: int) -> str:
        """Return which module it was, in a sentence; nothing where one was named a short while ago.

        skipped, updated: steps from this one on whose updates were skipped, and made: the weights are no longer its own.
        """
        if self._searched is not None and step < self._searched + EVERY:
            return ""
        self._searched = step
        try:
            description = self._search(step, skipped)
        except (RuntimeError, MemoryError, OSError, DifftrainError) as error:  # the others wait for this rank's word
            description = (
                f"running it again failed ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            )
        descriptions = self._ranks.gather(description)
        if not any(text is not None for text in descriptions):  # an engine that cannot
            return ""
        return _summary(descriptions, updated)

    def _search(self, step: int, skipped: int) -> str | None:
        """Run this rank's micro batches until one of them has it; "": none has, None: this engine cannot repeat."""
        model, root = self._model, self._model.parts.root
        counts = {"samples": float(self._samples(step))}
        for number, batch in enumerate(self._batches(step)):
            seen: ModuleCalls[Tensor | bool] = ModuleCalls(root, _finite)
            try:
                if not model.engine.repeat(number, batch, counts, seen, position=step - 1, skipped=skipped):
                    return None
            finally:
                seen.detach()
            if description := describe(seen):
                # of blocks that wait the host's values; of weights in few bits there are none to look at
                own = {name: value for name, value in root.state_dict().items() if not value.is_meta}
                weights = [name for name, _ in root.named_parameters() if name in own and not bool(_finite(own[name]))]
                return description + _of_weights(weights)
        return ""


def _finite(tensor: Tensor) -> Tensor | bool:
    """Tell whether all of a tensor is; on the device, where nobody waits for it."""
    return tensor.isfinite().all() if tensor.is_floating_point() else True


def describe(seen: ModuleCalls[Tensor | bool]) -> str:
    """Say in which module the first value that is no number came up; nothing where there is none."""

    def good(finite: dict[str, Tensor | bool]) -> Callable[[str], bool | None]:
        return lambda name: bool(finite[name]) if name in finite else None

    # --- what the network is given
    inputs = [call for call in seen.calls if call.module == ROOT and call.exited > 0]
    for call in inputs:
        if bad := [role.removeprefix("input.") for role, name in call.inputs.items() if not bool(seen.values[name])]:
            return f"the inputs of the network are not finite: {', '.join(bad)} (data, VAE or text encoders)"

    # --- forward, the loss, backward
    forward = first_parting(seen.calls, good(seen.values), lambda _: None, (), lambda _: None, ())
    if forward is not None:
        return _of_module(forward, "output", seen.calls)
    for targets, terms in zip(seen.targets, seen.terms):
        if bad := [name for name, is_finite in targets.items() if not bool(is_finite)]:
            return f"the network's output is finite, the target of the loss is not: {', '.join(bad)}"
        if bad := [name for name, is_finite in terms.items() if not bool(is_finite)]:
            return f"the network's output is finite, the loss of it is not: {', '.join(bad)}"
    backward = first_parting(
        seen.calls, lambda _: None, good(seen.gradients), seen.gradients, good(seen.parameters), seen.parameters
    )
    scale = f" at loss scale {seen.scale:g}" if seen.scale != 1.0 else ""
    return _of_module(backward, f"gradient{scale}", seen.calls) if backward is not None else ""


def _of_module(parting: Parting, what: str, calls: list[ModuleCall]) -> str:
    beside = ""
    if parting.between:
        beside = f", between its parts: {parting.between} is the first to use it"
    elif parting.direction == "backward" and parting.maker not in ("", parting.module):
        beside = f", passed back to {parting.maker}"
    elif parting.direction == "backward" and parting.module == ROOT:
        beside = ", passed to it by the loss"
    elif parting.direction == "parameter":
        beside = f", of {parting.tensor}"
    return (
        f"the first module with a non-finite {what} is {parting.module} ({parting.kind}), micro batch "
        f"{parting.call.partition('.')[0]}{beside}"
    )


def _of_weights(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"; weights that are not finite: {names[0]}{more}"


def _summary(descriptions: list[str | None], updated: int) -> str:
    """Put together what the ranks found; those that found nothing say nothing where another has it."""
    present = [(rank, text) for rank, text in enumerate(descriptions) if text]
    if not present:
        since = f" with the weights as they are {updated} updates later" if updated else ""
        return f"run again{since}, all its values are finite"
    if len(descriptions) == 1:
        return present[0][1]
    first = present[0][1]
    same = [rank for rank, text in present if text == first]
    ranks = f"rank {same[0]}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
    others = [f"rank {rank}: {text}" for rank, text in present if text != first]
    return "; ".join([f"{ranks}: {first}", *others[:3]])
