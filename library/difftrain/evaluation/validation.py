"""Validation loss: global sums over global counts, so that it is the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.contracts import METRIC, Batch

if TYPE_CHECKING:
    from torch import Tensor

Gather = Callable[[Any], list[Any]]  # every rank's value, on every rank


class Evaluates(Protocol):
    """The part of an engine that is needed here."""

    def evaluate(self, micro: list[Batch]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Validation:
    """Hold the mean loss over some samples, and its terms where there are several."""

    loss: float
    samples: int
    terms: dict[str, float]

    def record(self, step: int) -> dict[str, Any]:
        """Return the line of validation.jsonl."""
        terms = self.terms if len(self.terms) > 1 else {}
        return {"step": step, "loss": self.loss, "samples": self.samples, **({"terms": terms} if terms else {})}


def alone(value: Any) -> list[Any]:
    """Gather where there is one rank."""
    return [value]


def rounds(batches: Iterable[Batch], gather: Gather) -> Iterator[tuple[list[Batch], int]]:
    """Yield this rank's micro batches one by one with the samples that all ranks have in the round.

    A rank whose batches are used up gets empty lists until the last rank is done: evaluating is collective.
    """
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        shares = gather(0.0 if batch is None else batch.counts["samples"])
        if not any(shares):
            return
        yield ([] if batch is None else [batch]), round(sum(shares))


def validate(engine: Evaluates, batches: Iterable[Batch], *, gather: Gather = alone) -> Validation:
    """Return the mean loss over all ranks' batches. Collective: every rank calls it with its own, however many.

    gather: every rank's number, on every rank. The batches carry fixed draws, so two calls see the same noise.
    """
    samples = 0
    pending: list[dict[str, Tensor]] = []
    for micro, count in rounds(batches, gather):
        samples += count
        pending.append(engine.evaluate(micro))
    totals: dict[str, float] = {}
    for sums in pending:  # read only now: the host does not wait between batches
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return mean(totals, samples)


def mean(totals: dict[str, float], samples: int) -> Validation:
    """Divide global sums by the global count; no samples, no number. A term that was not measured is not there."""
    absent = {name for name, total in totals.items() if name.startswith(METRIC) and math.isnan(total)}
    absent |= {name for name in totals if f"{METRIC}{name}_loss" in absent}
    left = {name.removeprefix(METRIC): total for name, total in totals.items() if name not in absent}
    terms = {name: total / samples if samples else math.nan for name, total in left.items()}
    return Validation(terms.get("loss", math.nan), samples, {k: v for k, v in terms.items() if k != "loss"})
