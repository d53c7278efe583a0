"""The metric line and the record of one optimizer step: what the console shows and what metrics.jsonl keeps."""

from __future__ import annotations

import base64
import json
import math
from array import array
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
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

    def add(self, index: int, loss: float) -> None:
        """Take the loss of the step at this place (from 0) in its epoch."""
        missing = index + 1 - len(self._losses)
        if missing > 0:
            self._losses.extend([0.0] * missing)
            self._known.extend(bytes(missing))
        if not math.isfinite(loss):
            return
        if self._known[index]:
            self._total -= self._losses[index]
        else:
            self._known[index] = 1
            self._count += 1
        self._losses[index] = loss
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


MEASURED = "train/"  # tags of what a family measures


def fixed(value: float, significant: int = 6) -> str:
    """Write a number with so many significant digits in fixed-point, without needless zeros."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0.0"
    decimals = max(significant - 1 - math.floor(math.log10(abs(value))), 1)
    text = f"{value:.{decimals}f}".rstrip("0")
    return text + "0" if text.endswith(".") else text


_quoted = json.JSONEncoder(ensure_ascii=False).encode  # made once: json.dumps makes one a call
_key = lru_cache(4096)(json.dumps)  # a run writes the same keys line after line


def exact_json(value: Any) -> str:
    """Write JSON in which floats keep every bit but stand in fixed-point; what JSON cannot say (NaN) becomes null."""
    if isinstance(value, float):  # first: most of what a line holds
        if not math.isfinite(value):
            return "null"
        text = float.__repr__(value)
        return f"{Decimal(text):f}" if "e" in text else text
    if isinstance(value, str):
        return _quoted(value)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, dict):
        return "{" + ", ".join([f"{_key(str(k))}: {exact_json(v)}" for k, v in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join([exact_json(v) for v in value]) + "]"
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


@dataclass(frozen=True)
class StepMetrics:
    """Hold what is said of one optimizer step.

    step_loss: mean over all ranks and micro batches. lr: of the first group, lrs: of all, by name. d: what an optimizer
    that estimates the rate (D-Adaptation, Prodigy) multiplies them by. grad_norm: before clipping. fps, compute_fps, data_wait_s, step_s: of the steps since the last line. skipped: updates left out so far.
    elapsed_s: since the session began.
    """

    step: int
    epoch: int
    step_loss: float
    avr_loss: float
    lr: float
    grad_norm: float
    fps: float
    compute_fps: float
    data_wait_s: float
    peak_memory_gib: float
    samples_seen: int
    step_s: float = 0.0
    lrs: dict[str, float] = field(default_factory=dict)
    d: float | None = None
    terms: dict[str, float] = field(default_factory=dict)  # parts of the loss, where it has more than one
    measures: dict[str, float] = field(default_factory=dict)  # what a family measures beside, by name, as step_loss is
    skipped: int = 0
    session: int = 1
    elapsed_s: float = 0.0

    def line(self) -> str:
        """Return the console line."""
        skipped = f"skipped={self.skipped} " if self.skipped else ""
        adapted = "" if self.d is None else f"adapted={fixed(self.d * self.lr, 4)} "
        return (
            f"step={self.step} epoch={self.epoch} step_loss={fixed(self.step_loss)} avr_loss={fixed(self.avr_loss)} "
            f"lr={fixed(self.lr, 4)} {adapted}grad_norm={fixed(self.grad_norm, 4)} {skipped}"
            f"data_wait={fixed(round(self.data_wait_s, 6), 3)} mem={fixed(round(self.peak_memory_gib, 3), 4)} "
            f"FPS: {fixed(self.fps, 4)}"
        )

    def record(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl; groups and terms only where there is more than one, d where there is one.

        Measures stand in it by the tags that they have in trackers.
        """
        record = dict(vars(self))  # asdict copies what is in it, too, which every step would pay for
        del record["measures"]
        for name in ("lrs", "terms"):
            if len(record[name]) < 2:
                del record[name]
        if self.d is None:
            del record["d"]
        return record | self._tagged()

    def _tagged(self) -> dict[str, float]:
        return {f"{MEASURED}{name}": value for name, value in self.measures.items()}

    def scalars(self) -> dict[str, float]:
        """Return what trackers plot, by kohya's tags where it has one."""
        values = {
            "loss/current": self.step_loss,
            "loss/average": self.avr_loss,
            "grad_norm": self.grad_norm,
            "speed/fps": self.fps,
            "speed/compute_fps": self.compute_fps,
            "speed/data_wait_s": self.data_wait_s,
            "memory/peak_gib": self.peak_memory_gib,
            "progress/epoch": float(self.epoch),
            "progress/samples_seen": float(self.samples_seen),
        }
        lrs = self.lrs or {"all": self.lr}
        values |= {f"lr/{name}": value for name, value in lrs.items()}
        if self.d is not None:
            values |= {f"lr/d*lr/{name}": self.d * value for name, value in lrs.items()}
        values |= {f"loss/{name}": value for name, value in self.terms.items()}
        values |= self._tagged()
        return {name: value for name, value in values.items() if math.isfinite(value)}
