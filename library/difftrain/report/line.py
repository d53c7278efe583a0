"""The metric line and the record of one optimizer step: what the console shows and what metrics.jsonl keeps.

    step=12 epoch=1 step_loss=0.12345 avr_loss=0.12801 lr=0.000001 grad_norm=0.412 data_wait=0.002 mem=31.25 FPS: 20.17

Scripts of our users read these lines with `grep -o 'step_loss=[0-9.]*'` and with `grep 'FPS: ' | awk '{print $NF}'`,
or `awk -F 'FPS: ' '{print $2}'`. So `FPS: ` ends the line, after data_wait (seconds per step) and mem (peak GiB), and
every number is in fixed-point: from `1e-05` that grep would read a learning rate of 1.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

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


def exact_json(value: Any) -> str:
    """Write JSON in which floats keep every bit but stand in fixed-point; what JSON cannot say (NaN) becomes null."""
    if isinstance(value, bool) or value is None or isinstance(value, int | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return f"{Decimal(repr(float(value))):f}" if math.isfinite(value) else "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {exact_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(exact_json(v) for v in value) + "]"
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
        record = asdict(self)
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
