"""Validation and quantile losses against sums done by hand, over one and over several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from difftrain.contracts import Batch, Bucket, DrawSpec
from difftrain.evaluation import quantile_losses, validate
from difftrain.evaluation.losses import value_at, with_draw
from difftrain.testing.threads import on_threads

DRAWS = {"noise": DrawSpec("normal", channels=1), "timestep": DrawSpec("integer", high=1000)}


def batch(first: int, size: int) -> Batch:
    ids = torch.arange(first, first + size)
    return Batch(
        bucket=Bucket(8, 8),
        record_id=ids,
        occurrence=torch.zeros_like(ids),
        features={"pixels": ids.float()},
        draws={"noise": (ids * 0.37) % 1, "timestep": (ids * 7919) % 1000},
        counts={"samples": float(size)},
    )


def loss_of(each: Batch) -> torch.Tensor:
    """A loss that depends on record, noise and timestep."""
    return (1 + each.features["pixels"] / 10) * (each.draws["timestep"] / 1000) + each.draws["noise"]


class Engine:
    """Sum the losses of all ranks' batches, as an engine's evaluate does; collective."""

    def __init__(self, ranks: Any = None) -> None:
        self.ranks, self.calls = ranks, 0

    def evaluate(self, micro: list[Batch]) -> dict[str, torch.Tensor]:
        mine = self.own_sums(micro)["loss"]
        total = sum(self.ranks.gather(mine)) if self.ranks else mine
        return {"loss": total, "denoise": total * 0.75, "other": total * 0.25}

    def own_sums(self, micro: list[Batch]) -> dict[str, torch.Tensor]:
        self.calls += 1
        mine = sum((loss_of(each).double().sum() for each in micro), torch.zeros((), dtype=torch.float64))
        return {"loss": mine, "denoise": mine * 0.75, "metric/denoise_loss": mine * 0.5}


def on_ranks(shares: list[list[Batch]], work: Any) -> list[Any]:
    results = on_threads(len(shares), lambda ranks: work(Engine(ranks), shares[ranks.rank], ranks.gather))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


SPLITS = [
    [[batch(0, 4), batch(4, 4), batch(8, 3)]],
    [[batch(0, 2), batch(2, 2), batch(4, 2)], [batch(6, 5)]],
    [[batch(0, 11)], [], []],
    [[batch(0, 1)], [batch(1, 9), batch(10, 1)], []],
]


@pytest.mark.parametrize("shares", SPLITS)
def test_validation_is_the_mean_over_samples_on_any_split(shares: list[list[Batch]]) -> None:
    results = on_ranks(shares, lambda engine, mine, gather: validate(engine, mine, gather=gather))
    expected = loss_of(batch(0, 11)).double().mean().item()
    for result in results:
        assert result.samples == 11 and result.loss == pytest.approx(expected, rel=1e-12)
        assert result.terms == pytest.approx({"denoise": 0.75 * expected, "other": 0.25 * expected})
    assert results[0].record() == {"loss": results[0].loss, "samples": 11, "terms": results[0].terms}


@pytest.mark.parametrize("shares", SPLITS)
def test_quantile_losses_are_those_of_fixed_timesteps(shares: list[list[Batch]]) -> None:
    results = on_ranks(shares, lambda engine, mine, gather: quantile_losses(engine, mine, DRAWS, gather=gather))
    whole = batch(0, 11)
    for rows in results:
        assert [row["quantile"] for row in rows] == pytest.approx([k / 10 for k in range(1, 10)])
        assert [row["timestep"] for row in rows] == list(range(100, 1000, 100))
        for row in rows:
            expected = loss_of(with_draw(whole, "timestep", row["timestep"])).double().mean().item()
            assert row["loss"] == pytest.approx(expected, rel=1e-12) and row["samples"] == 11
            assert row["metrics"] == pytest.approx({"denoise_loss": 0.5 * expected})


@pytest.mark.parametrize("shares", SPLITS)
def test_what_was_not_measured_is_not_there(shares: list[list[Batch]]) -> None:
    """A rank without a batch adds zeros; the others say by NaN that nothing was measured."""

    class Silent(Engine):
        def own_sums(self, micro: list[Batch]) -> dict[str, torch.Tensor]:
            found = super().own_sums(micro)
            absent = torch.tensor(float("nan") if micro else 0.0, dtype=torch.float64)
            return {**found, "repa": torch.zeros_like(absent), "metric/repa_loss": absent}

        def evaluate(self, micro: list[Batch]) -> dict[str, torch.Tensor]:
            sums = self.own_sums(micro)
            return {name: sum(self.ranks.gather(value)) for name, value in sums.items()}

    def both(ranks: Any) -> tuple[Any, Any]:
        engine, mine = Silent(ranks), shares[ranks.rank]
        return quantile_losses(engine, mine, DRAWS, gather=ranks.gather), validate(engine, mine, gather=ranks.gather)

    for found in on_threads(len(shares), both):
        assert not isinstance(found, Exception)
        rows, validation = found
        assert all(set(row["metrics"]) == {"denoise_loss"} for row in rows)
        assert set(validation.terms) == {"denoise", "denoise_loss"}


def test_the_same_batches_give_the_same_bits_whoever_has_them() -> None:
    """The sums are of very different sizes, in fp32: added up in another order they would differ."""

    class Single(Engine):
        def own_sums(self, micro: list[Batch]) -> dict[str, torch.Tensor]:
            sums = super().own_sums(micro)
            scale = 10.0 ** (int(micro[0].record_id[0]) % 7) if micro else 0.0
            return {name: (value * scale).float() for name, value in sums.items()}

    batches = [batch(first, 3) for first in range(0, 36, 3)]

    def losses(size: int) -> list[float]:
        found = on_threads(
            size,
            lambda ranks: quantile_losses(
                Single(ranks), batches[ranks.rank :: size], DRAWS, gather=lambda value: ranks.gather(value)
            ),
        )
        assert all(rows == found[0] for rows in found)
        return [row["loss"] for row in found[0]]  # type: ignore[union-attr]

    assert losses(1) == losses(2) == losses(3) == losses(5)


def test_quantiles_of_a_flow_are_what_its_family_makes_of_them() -> None:
    """The time of a flow may hang on the bucket, so a row has no one value of it."""
    draws = {"timestep": DrawSpec("uniform", through=through)}
    assert value_at(draws["timestep"], 3, Bucket(8, 8)) == pytest.approx(0.3 * 8)
    rows = quantile_losses(Engine(), [batch(0, 2)], draws)
    assert all("timestep" not in row for row in rows) and rows[2]["quantile"] == 0.3
    at = with_draw(batch(0, 2), "timestep", 2)
    assert rows[2]["loss"] == pytest.approx(loss_of(at).double().mean().item())


def through(quantile: float, bucket: Bucket) -> float:
    return quantile * bucket.height


def test_batches_are_taken_one_by_one_and_left_as_they_were() -> None:
    engine = Engine()
    seen: list[int] = []

    def source() -> Any:
        for first in (0, 4):
            seen.append(engine.calls)
            yield batch(first, 4)

    quantile_losses(engine, source(), DRAWS)
    assert seen == [0, 9]
    original = batch(0, 4)
    changed = with_draw(original, "timestep", 300)
    assert changed.draws["timestep"].tolist() == [300] * 4 and changed.draws["timestep"].dtype == torch.int64
    assert (
        torch.equal(changed.draws["noise"], original.draws["noise"]) and original.draws["timestep"].unique().numel() > 1
    )


def test_no_samples_give_no_number() -> None:
    result = validate(Engine(), [])
    assert result.samples == 0 and result.loss != result.loss
    rows = quantile_losses(Engine(), [], DRAWS)
    assert len(rows) == 9 and all(row["loss"] != row["loss"] for row in rows)


def test_quantiles_of_each_kind_of_draw() -> None:
    assert [value_at(DrawSpec("integer", high=1000), k) for k in range(1, 10)] == list(range(100, 1000, 100))
    assert [value_at(DrawSpec("integer", high=7), k) for k in (1, 5, 9)] == [0, 3, 6]
    assert value_at(DrawSpec("uniform"), 3) == 0.3
    with pytest.raises(ValueError, match="kind 'normal'"):
        value_at(DRAWS["noise"], 5)
    with pytest.raises(ValueError, match="no draw 'u_t', only noise, timestep"):
        quantile_losses(Engine(), [], DRAWS, draw="u_t")
