"""How fast a card could be: vendors' dense peaks, and the matmul rate measured on the spot.

MFU = model FLOPs per second / vendor's peak; matmul utilisation = model FLOPs per second / measured matmul rate. The
first compares cards by their data sheets, the second says how much of what this card really does is used. On a CPU there
is no vendor's figure, so only the second is given.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


CPU_BUDGET_S = 0.25  # of the measurement on a CPU


class Peak(NamedTuple):
    """Dense TFLOP/s of one card, without sparsity; None where the vendor gives no figure."""

    bf16: float | None
    fp16: float | None
    fp32: float | None  # without TF32
    source: str


_DATASHEET = "NVIDIA data sheet, half of the figure with sparsity"
# Huawei's own figure per chip adds the vector units (B3: 313); these are the cube units' alone: cores x 8192 FLOP x clock.
_CUBE = "torchtitan-npu's table: cube units of the chip, fp16 and bf16"

# Patterns of whole words in the name that the device gives itself; the first that is found counts.
PEAKS: dict[str, Peak] = {
    "GB200": Peak(2500.0, 2500.0, 80.0, _DATASHEET),
    "B200": Peak(2250.0, 2250.0, 75.0, _DATASHEET),
    "GH200": Peak(989.5, 989.5, 67.0, _DATASHEET),
    "H200 NVL": Peak(835.5, 835.5, 60.0, _DATASHEET),
    "H200": Peak(989.5, 989.5, 67.0, _DATASHEET),
    "H100 NVL": Peak(835.5, 835.5, 60.0, _DATASHEET),
    "H100 PCIe": Peak(756.5, 756.5, 51.0, _DATASHEET),
    "H100": Peak(989.5, 989.5, 67.0, _DATASHEET),
    "H800": Peak(989.5, 989.5, 67.0, _DATASHEET),
    "H20": Peak(148.0, 148.0, 44.0, "NVIDIA data sheet"),
    "A100": Peak(312.0, 312.0, 19.5, "NVIDIA data sheet"),
    "A800": Peak(312.0, 312.0, 19.5, "NVIDIA data sheet"),
    "A40": Peak(149.7, 149.7, 37.4, "NVIDIA data sheet"),
    "A10G": Peak(None, None, None, "no data sheet: a cloud's own variant"),
    "A10": Peak(125.0, 125.0, 31.2, "NVIDIA data sheet"),
    "L40S": Peak(362.05, 362.05, 91.6, "NVIDIA data sheet"),
    "L40": Peak(181.05, 181.05, 90.5, "NVIDIA data sheet"),
    "L20": Peak(119.5, 119.5, 59.8, "NVIDIA data sheet"),
    "L4": Peak(121.0, 121.0, 30.3, _DATASHEET),
    "V100-SXM2": Peak(None, 125.0, 15.7, "NVIDIA data sheet"),
    "V100-PCIE": Peak(None, 112.0, 14.0, "NVIDIA data sheet"),
    "RTX 4090(?! Laptop)": Peak(165.2, 165.2, 82.6, "NVIDIA Ada white paper, fp32 accumulation"),
    "RTX 3090(?! Ti)": Peak(71.0, 71.0, 35.6, "NVIDIA GA102 white paper, fp32 accumulation"),
    "Ascend910B1": Peak(373.88, 373.88, None, _CUBE),
    "Ascend910B2C?": Peak(353.8944, 353.8944, None, _CUBE),
    "Ascend910B3": Peak(294.912, 294.912, None, _CUBE),
    "Ascend910B4": Peak(245.76, 245.76, None, _CUBE),
    r"Ascend910_93\w*": Peak(353.8944, 353.8944, None, _CUBE + " (one die of an A3 module)"),
    "Ascend910A": Peak(None, 256.0, None, "Huawei's announcement of the Ascend 910, 2019"),
    r"Ascend910(Pro|Premium)\w*": Peak(None, 256.0, None, "Huawei's announcement of the Ascend 910, 2019"),
}

DTYPE_OF_PRECISION = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


def vendor_peak(device_name: str, precision: str) -> tuple[float, str] | None:
    """Return a card's dense peak in FLOP/s and its source, or None where it is not known.

    precision: of the mixed precision, no | fp16 | bf16.
    """
    for pattern, peak in PEAKS.items():
        match = re.search(rf"(?<!\w)({pattern})(?!\w)", device_name, re.IGNORECASE)
        if match:
            value = getattr(peak, DTYPE_OF_PRECISION[precision])
            return None if value is None else (value * 1e12, f"{match.group()}: {peak.source}")
    return None


def measure_matmul(
    device: torch.device,
    precision: str,
    synchronize: Callable[[], None],
    *,
    budget_s: float | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the FLOP/s of a square matmul on this device: the best of the tries that fit into the time.

    Random operands: a product of zeros can be faster than that of real data. The size fills a card's units; where that
    would take too long, and on a CPU, it is grown until one product takes long enough to be timed.
    budget_s: None: a second; on a CPU, whose short runs are not to wait longer than they train, a quarter of one.
    """
    import torch

    if budget_s is None:
        budget_s = CPU_BUDGET_S if device.type == "cpu" else 1.0

    dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    size, most = (256, 2048) if device.type == "cpu" else (8192, 8192)
    if size == most:
        probe = torch.randn(512, 512, device=device, dtype=torch.float32).to(dtype)
        probe @ probe  # loads the kernel
        synchronize()
        began = now()
        probe @ probe
        synchronize()
        size = size if (now() - began) * (size / 512) ** 3 < budget_s else 256
    deadline = now() + budget_s
    best = 0.0
    with torch.no_grad():
        while True:
            a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
            out = torch.empty(size, size, device=device, dtype=dtype)
            torch.matmul(a, b, out=out)  # loads the kernel
            synchronize()
            took = 0.0
            for _ in range(10):
                began = now()
                torch.matmul(a, b, out=out)
                synchronize()
                took = now() - began
                if took > 0:
                    best = max(best, 2 * size**3 / took)
                if now() > deadline:
                    return best
            if size >= most or took > budget_s / 20:
                return best
            size *= 2
