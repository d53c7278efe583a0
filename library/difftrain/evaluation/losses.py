"""Loss on records that are not trained on: its mean as training draws timesteps, and at nine fixed quantiles of them.

A mean over drawn timesteps mixes all noise levels. At quantiles every record is looked at nine times, with the same noise
and at 0.1 ... 0.9 of the way to it, so that two runs can be compared level by level.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from difftrain.contracts import METRIC, Batch, Bucket, DrawSpec

if TYPE_CHECKING:
    from torch import Tensor

Gather = Callable[[Any], list[Any]]  # every rank's value, on every rank
TENTHS = range(1, 10)
LOSS = "loss"


class Evaluates(Protocol):
    """The part of an engine that is needed here: sums over all ranks' batches, and over this rank's own."""

    def evaluate(self, micro: list[Batch]) -> dict[str, Tensor]: ...
    def own_sums(self, micro: list[Batch]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Validation:
    """Hold the mean loss over some samples, and its terms where there are several."""

    loss: float
    samples: int
    terms: dict[str, float]

    def record(self) -> dict[str, Any]:
        """Return it as a line of validation.jsonl has it."""
        terms = self.terms if len(self.terms) > 1 else {}
        return {LOSS: self.loss, "samples": self.samples, **({"terms": terms} if terms else {})}


def alone(value: Any) -> list[Any]:
    """Gather where there is one rank."""
    return [value]


def validate(engine: Evaluates, batches: Iterable[Batch], *, gather: Gather = alone) -> Validation:
    """Return the mean loss over all ranks' batches. Collective: every rank calls it with its own, however many.

    gather: every rank's number, on every rank. The batches carry fixed draws, so two calls see the same noise.
    """
    (pending,), samples = _measured(engine.evaluate, batches, [lambda batch: batch], gather)
    totals: dict[str, float] = {}
    for sums in pending:  # read only now: the host does not wait between batches
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    terms = _means(totals, samples)
    return Validation(terms.pop(LOSS, math.nan), samples, terms)


def quantile_losses(
    engine: Evaluates,
    batches: Iterable[Batch],
    draws: Mapping[str, DrawSpec],
    *,
    draw: str = "timestep",
    gather: Gather = alone,
) -> list[dict[str, Any]]:
    """Return a row (quantile, value of the draw, loss, samples) for each of 0.1 ... 0.9. Collective.

    draws: of the family's FeatureSpec. draw: the one that places a sample along the noise; where it is an integer in
    [low, high), the quantile q is floor(q n) of its n values, where it is uniform, q itself, or what the family makes
    of it. What a family measures beside the loss stands in the row's "metrics".
    Every batch is loaded once. The sums of single batches are added up exactly, so that where the ranks' batches are
    the same ones together, so is every bit of the result, whoever had which.
    """
    if draw not in draws:
        raise ValueError(f"this family has no draw {draw!r}, only {', '.join(draws)}")

    # each batch is measured at every quantile while it is here
    def at(tenth: int) -> Callable[[Batch], Batch]:
        return lambda batch: with_draw(batch, draw, value_at(draws[draw], tenth, batch.bucket))

    pending, samples = _measured(engine.own_sums, batches, [at(tenth) for tenth in TENTHS], gather)

    # the sums of all ranks' batches together, into a mean at each quantile
    shares = gather([_read(sums) for sums in pending])
    rows = []
    for index, tenth in enumerate(TENTHS):
        sums = [batch for share in shares for batch in share[index]]
        names = dict.fromkeys(name for row in sums for name in row)
        means = _means({name: math.fsum(row.get(name, 0.0) for row in sums) for name in names}, samples)
        row: dict[str, Any] = {"quantile": tenth / 10, LOSS: means.pop(LOSS, math.nan), "samples": samples}
        if draws[draw].through is None:  # one value, whatever the bucket
            row[draw] = value_at(draws[draw], tenth)
        rows.append(row | ({"metrics": means} if means else {}))
    return rows


# --- what both have in common


def _measured(
    sums_of: Callable[[list[Batch]], dict[str, Tensor]],
    batches: Iterable[Batch],
    looks: list[Callable[[Batch], Batch]],
    gather: Gather,
) -> tuple[list[list[dict[str, Tensor]]], int]:
    """Return the sums of every batch at each look, still on the device, and the samples of all ranks."""
    pending: list[list[dict[str, Tensor]]] = [[] for _ in looks]
    samples = 0
    for micro, count in _rounds(batches, gather):
        samples += count
        for look, sums in zip(looks, pending, strict=True):
            sums.append(sums_of([look(batch) for batch in micro]))
    return pending, samples


def _rounds(batches: Iterable[Batch], gather: Gather) -> Iterator[tuple[list[Batch], int]]:
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


def _read(sums: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Bring the loss and what is measured beside it to the host: one wait for all."""
    kept = [{name: value for name, value in row.items() if name == LOSS or name.startswith(METRIC)} for row in sums]
    flat = [value for row in kept for value in row.values()]
    values = iter(torch.stack(flat).tolist() if flat else [])
    return [{name: next(values) for name in row} for row in kept]


def _means(totals: dict[str, float], samples: int) -> dict[str, float]:
    """Divide global sums by the global count; no samples, no number. A term that was not measured is not there."""
    absent = {name for name, total in totals.items() if name.startswith(METRIC) and math.isnan(total)}
    absent |= {name for name in totals if f"{METRIC}{name}_loss" in absent}
    return {
        name.removeprefix(METRIC): total / samples if samples else math.nan
        for name, total in totals.items()
        if name not in absent
    }


# --- quantiles of the timestep


def value_at(spec: DrawSpec, tenth: int, bucket: Bucket | None = None) -> float | int:
    """Return what a draw is at a quantile of tenth / 10, by integer arithmetic where it is an integer."""
    if spec.kind == "integer":
        return spec.low + tenth * (spec.high - spec.low) // 10
    if spec.kind == "uniform" and spec.through is not None:
        assert bucket is not None
        return spec.through(tenth / 10, bucket)
    if spec.kind == "uniform":
        return tenth / 10
    raise ValueError(f"a draw of kind {spec.kind!r} has no noise level")


def with_draw(batch: Batch, name: str, value: float) -> Batch:
    """Return the batch with one draw the same for all samples."""
    return dataclasses.replace(batch, draws={**batch.draws, name: torch.full_like(batch.draws[name], value)})
