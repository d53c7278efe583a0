"""The published tables of versions, and what is said of an installation that is not in them."""

from __future__ import annotations

import pytest
from refusals import names

from difftrain.device import versions
from difftrain.device.versions import COMPATIBLE, DRIVERS, PAIRS


def test_every_row_is_whole_and_has_its_source() -> None:
    legend = versions.__doc__ or ""
    sources = {pair.source for pair in PAIRS} | {row[1] for row in (*COMPATIBLE.values(), *DRIVERS.values())}
    assert all(f"\n{letter}: " in legend for source in sources for letter in source.split(", "))
    assert len({pair.torch_npu for pair in PAIRS}) == len(PAIRS)
    for pair in PAIRS:
        assert versions.same_torch(pair.torch_npu, pair.torch), pair
        assert versions.series(pair.cann) in COMPATIBLE[pair.product][0], pair
        assert versions.judge_cann(pair.torch_npu, pair.cann).fits, pair
    for fitting, _ in (*COMPATIBLE.values(), *DRIVERS.values()):
        assert list(fitting) == sorted(fitting, key=versions.numbers)


@pytest.mark.parametrize(
    ("text", "numbers", "series"),
    [("8.3.RC1", (8, 3), "8.3"), ("2.13.0+cpu", (2, 13, 0), "2.13"), ("9", (9,), "9.0"), ("unknown", (), "")],
)
def test_versions_as_they_are_written(text: str, numbers: tuple[int, ...], series: str) -> None:
    assert (versions.numbers(text), versions.series(text)) == (numbers, series)


def test_a_torch_npu_is_for_one_torch() -> None:
    assert versions.judge_torch("2.13.0", "2.13.0+cpu").fits and versions.judge_torch("2.7.1.post2", "2.7.1").fits
    wrong = versions.judge_torch("2.7.1", "2.13.0+cpu")
    assert wrong.fits is False and names(wrong.observed, "torch_npu 2.7.1", "torch 2.7.1", "torch 2.13.0+cpu")
    assert names(wrong.remedy, "torch_npu==2.13.0", "torch==2.7.1")
    assert "torch_npu==2.9.0.post9" in versions.judge_torch("2.7.1", "2.9.0").remedy
    assert "torch_npu==3.1.0" in versions.judge_torch("2.7.1", "3.1.0").remedy  # no row: the rule


@pytest.mark.parametrize(
    ("torch_npu", "cann", "fits", "facts"),
    [
        ("2.13.0", "9.2.0", True, ["CANN 9.2.0", "torch_npu 2.13.0"]),
        ("2.13.0", "8.5.0.alpha001", True, ["CANN 8.5.0.alpha001", "compatible", "torch_npu 2.13.0", "CANN 9.2.0"]),
        ("2.13.0", "7.0.0", False, ["CANN 7.0.0", "older", "8.5"]),
        ("2.8.0", "8.5.0", None, ["CANN 8.5.0", "newer", "8.3"]),
        ("2.13.0.post9", "9.1.0", True, ["CANN 9.1.0", "compatible"]),  # no row of its own: that of its torch
        ("1.11.0", "6.3.RC2", None, ["CANN 6.3.RC2", "table", "torch_npu 1.11.0"]),
        ("2.13.0", None, None, ["CANN"]),
    ],
)
def test_cann_under_a_torch_npu(torch_npu: str, cann: str | None, fits: bool | None, facts: list[str]) -> None:
    judged = versions.judge_cann(torch_npu, cann)
    assert judged.fits is fits and names(judged.observed, *facts), judged
    assert fits or judged.remedy


@pytest.mark.parametrize(
    ("cann", "driver", "fits"),
    [
        ("8.5.0", "25.5.0", True),
        ("8.2.RC1", "24.1.rc3", True),
        ("8.5.0", "23.0.6", False),
        ("9.1.0", "27.0.0", None),
        ("9.9.9", "25.5.0", None),
        (None, "25.5.0", None),
        ("8.5.0", None, None),
    ],
)
def test_drivers_under_a_cann(cann: str | None, driver: str | None, fits: bool | None) -> None:
    judged = versions.judge_driver(cann, driver)
    assert judged.fits is fits and names(judged.observed, f"driver {driver}" if driver else "driver")
    assert fits is not False or "Ascend HDK 25.0" in judged.remedy
