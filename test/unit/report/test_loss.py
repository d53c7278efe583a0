"""The averaged loss against kohya's recorder, written down from its description."""

from __future__ import annotations

import json
import math
import random

import pytest

from difftrain.report.line import AverageLoss


def kohyas_average(epochs: list[list[float]]) -> list[float]:
    """Keep the latest loss of each place in the epoch; the average is over the places known so far."""
    latest: list[float] = []
    averages = []
    for number, losses in enumerate(epochs):
        for place, loss in enumerate(losses):
            if number == 0 or place == len(latest):
                latest.append(loss)
            else:
                latest[place] = loss
            averages.append(math.fsum(latest) / len(latest))
    return averages


@pytest.mark.parametrize("lengths", [[7, 7, 7], [5, 6, 5, 6], [1, 1, 1], [30, 2]])
def test_same_as_kohyas(lengths: list[int]) -> None:
    numbers = random.Random(3)
    epochs = [[numbers.random() for _ in range(length)] for length in lengths]
    average, got = AverageLoss(), []
    for losses in epochs:
        for place, loss in enumerate(losses):
            average.add(place, loss)
            got.append(average.value)
    assert got == pytest.approx(kohyas_average(epochs), rel=1e-12)


def test_going_on_from_a_state_is_bit_equal() -> None:
    numbers = random.Random(4)
    losses = [(step % 11, numbers.random() if step % 9 else math.nan) for step in range(60)]
    straight = AverageLoss()
    expected = []
    for place, loss in losses:
        straight.add(place, loss)
        expected.append(straight.value)
    for cut in (0, 1, 13, 30, 59):
        first, second = AverageLoss(), AverageLoss()
        for place, loss in losses[:cut]:
            first.add(place, loss)
        second.load(json.loads(json.dumps(first.state())))
        got = []
        for place, loss in losses[cut:]:
            second.add(place, loss)
            got.append(second.value)
        assert str(got) == str(expected[cut:])


def test_a_loss_that_is_no_number_is_left_out() -> None:
    average = AverageLoss()
    assert math.isnan(average.value)
    for place, loss in enumerate([1.0, math.nan, 3.0]):
        average.add(place, loss)
    assert average.value == pytest.approx(2.0)
    average.add(1, 5.0)
    assert average.value == pytest.approx(3.0)
    average.add(0, math.inf)
    assert average.value == pytest.approx(3.0)


def test_an_empty_state_starts_afresh() -> None:
    average = AverageLoss()
    average.add(0, 1.0)
    average.load({})
    average.add(0, 3.0)
    assert average.value == 3.0
