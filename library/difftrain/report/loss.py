"""The averaged loss that the metric line prints."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any


class AverageLoss:
    """Average the loss over the last epoch's worth of steps, as kohya's trainers do.

    Every place in an epoch holds its latest loss: in the first epoch the mean is over the steps so far, later over all
    places, of which the new epoch's replace the old ones one by one. A non-finite loss (its update was skipped) is left
    out, or it would stay in the sum for ever.
    """

    def __init__(self) -> None:
        self._losses = array("d")
        self._known = bytearray()  # 1 where the place holds a finite loss
        self._total = 0.0
        self._count = 0

    def add(self, place: int, loss: float) -> None:
        """Take the loss of the step at this place (from 0) in its epoch."""
        missing = place + 1 - len(self._losses)
        if missing > 0:
            self._losses.extend([0.0] * missing)
            self._known.extend(bytes(missing))
        if not math.isfinite(loss):
            return
        if self._known[place]:
            self._total -= self._losses[place]
        else:
            self._known[place] = 1
            self._count += 1
        self._losses[place] = loss
        self._total += loss

    @property
    def value(self) -> float:
        """Return the average; NaN before the first finite loss."""
        return self._total / self._count if self._count else math.nan

    def state(self) -> dict[str, Any]:
        """Return everything as JSON can hold it, to the bit (11 bytes a step of an epoch)."""
        return {
            "total": self._total,
            "losses": base64.b64encode(self._losses.tobytes()).decode(),
            "known": base64.b64encode(bytes(self._known)).decode(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._losses = array("d")
        self._known = bytearray()
        self._total, self._count = 0.0, 0
        if state:
            self._losses.frombytes(base64.b64decode(state["losses"]))
            self._known = bytearray(base64.b64decode(state["known"]))
            self._total, self._count = state["total"], sum(self._known)
