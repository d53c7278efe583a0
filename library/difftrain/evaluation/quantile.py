"""Loss at nine fixed quantiles of the timestep: where along the noise a model is good, and where it is not.

A validation loss mixes all noise levels. Here every record is looked at nine times, with the same noise and at 0.1 ...
0.9 of the way to it, so that two runs can be compared level by level.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, DrawSpec
from difftrain.evaluation.validation import Evaluates, Gather, alone, mean, rounds

if TYPE_CHECKING:
    from torch import Tensor

TENTHS = range(1, 10)


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
    [low, high), the quantile q is floor(q n) of its n values, where it is uniform, q itself: the family turns it into
    its own time.
    Every batch is loaded once.
    """
    if draw not in draws:
        raise ValueError(f"this family has no draw {draw!r}, only {', '.join(draws)}")
    values = [value_at(draws[draw], tenth) for tenth in TENTHS]
    pending: list[list[dict[str, Tensor]]] = [[] for _ in TENTHS]
    samples = 0
    for micro, count in rounds(batches, gather):
        samples += count
        for value, sums in zip(values, pending):
            sums.append(engine.evaluate([with_draw(batch, draw, value) for batch in micro]))
    rows = []
    for tenth, value, sums in zip(TENTHS, values, pending):
        found = mean({"loss": sum(float(each["loss"]) for each in sums)}, samples)
        rows.append({"quantile": tenth / 10, draw: value, "loss": found.loss, "samples": samples})
    return rows


def value_at(spec: DrawSpec, tenth: int) -> float | int:
    """Return what a draw is at a quantile of tenth / 10, by integer arithmetic where it is an integer."""
    if spec.kind == "integer":
        return spec.low + tenth * (spec.high - spec.low) // 10
    if spec.kind == "uniform":
        return tenth / 10
    raise ValueError(f"a draw of kind {spec.kind!r} has no place along the noise")


def with_draw(batch: Batch, name: str, value: float) -> Batch:
    """Return the batch with one draw the same for all samples."""
    return dataclasses.replace(batch, draws={**batch.draws, name: torch.full_like(batch.draws[name], value)})
