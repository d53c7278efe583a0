"""Vendors' peaks by the names that devices give themselves, and the matmul rate."""

from __future__ import annotations

import pytest
import torch

from difftrain.report.peaks import PEAKS, measure_matmul, vendor_peak


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200", "no", 67.0),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "no", 19.5),
        ("NVIDIA A10", "fp16", 125.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Ascend910B3", "bf16", 294.912),
        ("Ascend910B2C", "bf16", 353.8944),
        ("Ascend910B4-1", "fp16", 245.76),
        ("Ascend910_9392", "bf16", 353.8944),
        ("Ascend910ProB", "fp16", 256.0),
    ],
)
def test_known_cards(device: str, precision: str, tflops: float) -> None:
    found = vendor_peak(device, precision)
    assert found is not None and found[0] == pytest.approx(tflops * 1e12) and found[1]


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("AMD EPYC", "no"),
        ("NVIDIA RTX A4000", "bf16"),  # not an A40
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA H2000", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),  # has no bf16 units
        ("Ascend910B3", "no"),
        ("", "bf16"),
    ],
)
def test_what_is_not_known_is_not_guessed(device: str, precision: str) -> None:
    assert vendor_peak(device, precision) is None


def test_cube_peaks_are_cores_times_clock() -> None:
    """The B2 and the B3 have 24 and 20 cores of 16 x 16 x 16 multiply-adds a cycle at 1.8 GHz."""
    for name, cores in {"Ascend910B2C?": 24, "Ascend910B3": 20}.items():
        assert PEAKS[name].bf16 == pytest.approx(cores * 2 * 16**3 * 1.8e9 / 1e12)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_matmul_rate_is_that_of_torch_on_this_machine(precision: str) -> None:
    rate = measure_matmul(torch.device("cpu"), precision, lambda: None, budget_s=0.3)
    assert 1e8 < rate < 1e14


def test_the_matmul_rate_follows_the_clock() -> None:
    """Every product takes a second by this clock, so the rate is that of the only size that fits into the time."""
    ticks = iter(float(n) for n in range(1000))
    assert measure_matmul(torch.device("cpu"), "no", lambda: None, budget_s=1.0, now=lambda: next(ticks)) == 2 * 256**3
