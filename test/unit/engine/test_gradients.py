"""What the first backward shows: tensors without any gradient but zeros, named with the cause that is known."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from engines import COUNTS, built, config, run

from difftrain.contracts import ConfigFault
from difftrain.engine import base, gradients
from difftrain.engine.gradients import check_zeros, largest_of
from difftrain.testing.family import TinyFamily, tiny_step

ONE = torch.tensor(1.0)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="difftrain"):
        yield


def tensors(**values: float) -> dict[str, torch.Tensor]:
    return {name.replace("_", "."): torch.tensor(value) for name, value in values.items()}


def test_magnitudes_are_those_of_what_is_there() -> None:
    found = largest_of({"a": torch.tensor([1.0, -3.0]), "b": None, "c": torch.empty(0), "d": torch.zeros(2)})
    assert {name: float(value) for name, value in found.items()} == {"a": 3.0, "d": 0.0}


@pytest.mark.parametrize(
    ("largest", "weights", "loss", "level"),
    [
        (tensors(net_a=0.0, net_b=1.0), tensors(net_a=1.0, net_b=0.0), ONE, logging.INFO),  # b begins as zeros
        (tensors(net_a=0.0, net_b=1.0), tensors(net_a=1.0, net_b=1.0), ONE, logging.WARNING),
        (tensors(net_a=0.0, net_b=0.0), tensors(net_a=1.0, net_b=1.0), 0 * ONE, logging.WARNING),  # the loss is 0
        (tensors(text_a=0.0, net_b=1.0), tensors(text_a=1.0, net_b=0.0), ONE, logging.INFO),
    ],
)
def test_zeros_are_named_with_their_cause(
    largest: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    loss: torch.Tensor,
    level: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    zeros = check_zeros(largest, weights, loss, speaks=True)
    assert zeros == [name for name, value in largest.items() if not value]
    (record,) = caplog.records
    assert record.levelno == level and zeros[0] in record.getMessage()
    caplog.clear()
    assert check_zeros(largest, weights, loss, speaks=False) == zeros and not caplog.records


def test_a_part_that_nothing_reaches_is_refused() -> None:
    with pytest.raises(ConfigFault, match=r"text 2 of 2.*text\.a"):
        check_zeros(tensors(text_a=0.0, text_b=0.0, net_c=1.0), tensors(text_a=1.0, net_c=1.0), ONE, speaks=True)


def test_what_a_family_says_to_be_silent_is_no_surprise(caplog: pytest.LogCaptureFixture) -> None:
    weights = tensors(net_a=1.0, net_b=1.0)
    check_zeros(tensors(net_a=0.0, net_b=1.0), weights, ONE, {"net.a"}, speaks=True)
    check_zeros(tensors(net_a=1.0, net_b=0.0), weights, ONE, {"net.a"}, speaks=True)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]


def test_numbers_that_are_none_are_no_zeros(caplog: pytest.LogCaptureFixture) -> None:
    assert check_zeros(tensors(net_a=float("nan")), {}, ONE, speaks=True) == [] and not caplog.records


def test_an_engine_that_sees_pieces_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert check_zeros({}, {}, ONE, speaks=True) == [] and len(caplog.records) == 1


@pytest.mark.parametrize("training", [{}, {"full_precision": "bf16", "mixed_precision": "bf16"}])
def test_an_engine_looks_once_a_session_and_changes_nothing(
    training: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[int, list[str]]] = []

    def looking(largest: dict[str, torch.Tensor], *rest: object, **how: object) -> list[str]:
        looks.append((len(largest), gradients.check_zeros(largest, *rest, **how)))  # type: ignore[arg-type]
        return looks[-1][1]

    plain = run(built(config(dict(training))), 0, 3)
    monkeypatch.setattr(base, "check_zeros", looking)
    engine = built(config(dict(training)))
    assert run(engine, 0, 3) == plain
    assert looks == [(len(engine._trained), [])]


@pytest.mark.parametrize("optimizer", [{}, {"fused_backward": True, "type": "AdaFactor"}])
def test_a_dead_layer_is_seen_by_every_kind_of_update(
    optimizer: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    engine = built(config({}, **optimizer), Silent())
    engine.step(tiny_step(0, 8), COUNTS)
    assert any("first 2 of 2" in record.getMessage() for record in caplog.records)


class Silent(TinyFamily):
    """A family whose last layer begins as zeros: nothing before it gets a gradient."""

    def load(self, **how: object) -> object:  # type: ignore[override]
        parts = super().load(**how)  # type: ignore[arg-type]
        with torch.no_grad():
            parts.root.last.weight.zero_()  # type: ignore[operator,union-attr]
        return parts
