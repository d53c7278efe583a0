"""What the first backward of a session shows: which trained tensors it reached, and which got nothing but zeros."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import ConfigFault, Fault

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("difftrain")
_SHOWN = 3  # names


def check_gradients(left: list[str]) -> None:
    """Name parameters that a backward left out; other ranks would wait for them for ever. Raises ConfigFault."""
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        what = f"parameters do not contribute to the loss: {', '.join(left[:5])}{more}"
        raise ConfigFault([Fault("model", what, "the family must freeze them")])


class Arrivals:
    """Note which weights a backward reaches, where engines take gradients away before anybody can look."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self._missing = dict.fromkeys(weights)
        self._hooks = [weight.register_post_accumulate_grad_hook(self._note(name)) for name, weight in weights.items()]

    def _note(self, name: str) -> Callable[[Any], None]:
        return lambda _: self._missing.pop(name, None)

    def missing(self) -> list[str]:
        """Name the weights that none has reached; asked once, after the first step."""
        while self._hooks:
            self._hooks.pop().remove()
        return list(self._missing)


@torch.no_grad()
def largest_of(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the largest magnitude of each tensor that is there, on its device; the host waits for nothing."""
    present = {name: value for name, value in tensors.items() if value is not None and value.numel()}
    return dict(zip(present, torch._foreach_norm(list(present.values()), float("inf")))) if present else {}


@torch.no_grad()
def check_zeros(
    largest: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    loss: Tensor,
    silent: Collection[str] = (),
    *,
    speaks: bool,
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> list[str]:
    """Return the trained tensors whose gradient is all zeros, and say how many they are, and why that may be.

    largest: the largest magnitude of each gradient that this rank sees, where they lie; the host waits for them once.
    weights: the same of the weights as the step began. loss: of this step. silent:
    names that no output depends on, as their family says. speaks: whether this rank says it. gather: returns what every
    rank has: rows, or tensors of its stage. Raises ConfigFault, on every rank alike, where no tensor of a part gets a
    gradient, and nothing that begins as zeros, and no loss of 0, is the cause.
    """
    # --- which tensors, of gradients and of weights, are zeros on all ranks
    of_all = (loss.detach().reshape(()), *largest.values(), *weights.values())
    values = torch.stack([value.to(loss.device).float().abs() for value in of_all]).tolist()
    names = (*((name, True) for name in largest), *((name, False) for name in weights))
    zero: dict[tuple[str, bool], bool] = {}
    for own in gather([(name, value == 0.0) for name, value in zip(names, values[1:])]):
        for name, is_zero in own:
            zero[name] = zero.get(name, True) and is_zero
    looked_at = [name for name, of_gradient in zero if of_gradient]
    zeros = [name for (name, of_gradient), is_zero in zero.items() if of_gradient and is_zero]
    if not looked_at and speaks:
        log.info("gradients of zeros are not looked for: this engine shards them")
    if not zeros:
        return []

    # --- by part, and the cause: a tensor that begins as zeros lets none through to what lies before it
    begin = sum(zero.values()) - len(zeros)
    every, without = (Counter(name.partition(".")[0] for name in group) for group in (looked_at, zeros))
    parts = ", ".join(f"{part} {without[part]} of {every[part]}" for part in without)
    shown = ", ".join(zeros[:_SHOWN]) + (f" and {len(zeros) - _SHOWN} more" if len(zeros) > _SHOWN else "")
    what = (
        f"{len(zeros)} of {len(looked_at)} trained tensors get a gradient of zeros at the first step ({parts}): {shown}"
    )
    if values[0] == 0.0:
        _log(logging.WARNING, f"{what}; the loss of this step is 0", speaks)
    elif dead := [part for part in without if without[part] == every[part] and not begin]:
        remedy = "the loss does not depend on it: exclude it from training"
        raise ConfigFault([Fault("model", f"no gradient reaches {', '.join(dead)}; {what}", remedy)])
    elif set(zeros) <= set(silent):
        _log(logging.INFO, f"{what}; no output depends on them", speaks)
    elif begin:
        _log(logging.INFO, f"{what}; as expected after the {begin} tensors that are initialised to zero", speaks)
    else:
        _log(logging.WARNING, f"{what}; no zero-initialised tensor explains it: does the loss use them?", speaks)
    return zeros


def _log(level: int, what: str, speaks: bool) -> None:
    if speaks:
        log.log(level, "%s", what)
