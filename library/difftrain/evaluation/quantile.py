"""Loss at nine fixed quantiles of the timestep: where along the noise a model is good, and where it is not.

A validation loss mixes all noise levels. Here every record is looked at nine times, with the same noise and at 0.1 ...
0.9 of the way to it, so that two runs can be compared level by level.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from difftrain.contracts import METRIC, Batch, Bucket, DrawSpec
from difftrain.evaluation.validation import Gather, alone, rounds

if TYPE_CHECKING:
    from torch import Tensor

TENTHS = range(1, 10)
LOSS = "loss"


class Sums(Protocol):
    """The part of an engine that is needed here."""

    def own_sums(self, micro: list[Batch]) -> dict[str, Tensor]: ...


def quantile_losses(
    engine: Sums,
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
    pending: list[list[dict[str, Tensor]]] = [[] for _ in TENTHS]
    samples = 0
    for micro, count in rounds(batches, gather):
        samples += count
        for tenth, sums in zip(TENTHS, pending):
            at = [with_draw(batch, draw, value_at(draws[draw], tenth, batch.bucket)) for batch in micro]
            sums.append(engine.own_sums(at))

    # the sums of all ranks' batches together, into a mean at each quantile
    shares = gather([_read(sums) for sums in pending])
    rows = []
    for place, tenth in enumerate(TENTHS):
        means = _means([batch for share in shares for batch in share[place]], samples)
        row: dict[str, Any] = {"quantile": tenth / 10, LOSS: means.pop(LOSS, math.nan), "samples": samples}
        if draws[draw].through is None:  # one value, whatever the bucket
            row[draw] = value_at(draws[draw], tenth)
        rows.append(row | ({"metrics": means} if means else {}))
    return rows


def _read(sums: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Bring the loss and what is measured beside it to the host: one wait for all."""
    kept = [{name: value for name, value in each.items() if name == LOSS or name.startswith(METRIC)} for each in sums]
    flat = [value for each in kept for value in each.values()]
    values = iter(torch.stack(flat).tolist() if flat else [])
    return [{name: next(values) for name in each} for each in kept]


def _means(batches: list[dict[str, float]], samples: int) -> dict[str, float]:
    """Divide global sums by the global count; no samples, no number. What was not measured is not there."""
    names = dict.fromkeys(name for each in batches for name in each)
    sums = {name: math.fsum(each.get(name, 0.0) for each in batches) for name in names}
    return {
        name.removeprefix(METRIC): value / samples if samples else math.nan
        for name, value in sums.items()
        if not (name.startswith(METRIC) and math.isnan(value))
    }


def value_at(spec: DrawSpec, tenth: int, bucket: Bucket | None = None) -> float | int:
    """Return what a draw is at a quantile of tenth / 10, by integer arithmetic where it is an integer."""
    if spec.kind == "integer":
        return spec.low + tenth * (spec.high - spec.low) // 10
    if spec.kind == "uniform" and spec.through is not None:
        assert bucket is not None
        return spec.through(tenth / 10, bucket)
    if spec.kind == "uniform":
        return tenth / 10
    raise ValueError(f"a draw of kind {spec.kind!r} has no place along the noise")


def with_draw(batch: Batch, name: str, value: float) -> Batch:
    """Return the batch with one draw the same for all samples."""
    return dataclasses.replace(batch, draws={**batch.draws, name: torch.full_like(batch.draws[name], value)})
