"""How nf4 is made wide: by our own operations, or by bitsandbytes' kernel where that is there, has the same bits and is faster.

Chosen once for a device and a dtype, at the first weight that is large enough for the answer to matter: importing the package
takes seconds. Both compute level times scale in fp32 and round once, so the choice changes no bit of a run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from difftrain.config.hidden_imports import is_installed, let_in

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("difftrain")
Decode = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]  # codes, scales, levels -> numbers, one after another
FEWEST = 1 << 20  # numbers of a weight for which a faster way is looked for
_PACKAGE, _KINDS = "bitsandbytes", ("cpu", "cuda")
_PROBE, _ROUNDS = (1 << 14, 32), 3  # blocks of 64 numbers, two in a byte


_chosen: dict[tuple[str, torch.dtype], Decode] = {}


def faster(device: torch.device, dtype: torch.dtype, ours: Decode, levels: Tensor) -> Decode:
    """Return what makes nf4 wide on a device: `ours`, or what has its bits in less time there. levels: (256, 2), of bytes."""
    if (device.type, dtype) not in _chosen:
        _chosen[device.type, dtype] = _compared(device, dtype, ours, levels)
    return _chosen[device.type, dtype]


def _compared(device: torch.device, dtype: torch.dtype, ours: Decode, levels: Tensor) -> Decode:
    if device.type not in _KINDS or not is_installed(_PACKAGE):
        return ours
    try:
        theirs = _theirs(dtype)
        codes = torch.arange(_PROBE[0] * _PROBE[1]).remainder(251).to(torch.uint8).view(_PROBE).to(device)
        scales = torch.linspace(1e-3, 2.0, _PROBE[0]).unsqueeze(1).to(device)
        same = torch.equal(ours(codes, scales, levels), theirs(codes, scales, levels))
        times = [_seconds(decode, codes, scales, levels) for decode in (ours, theirs)]
    except Exception as error:  # a package that does not fit this machine fails in many ways
        log.info("nf4 is made wide by our own operations: %s fails here (%s)", _PACKAGE, error)
        return ours
    wins = same and times[1] < times[0]
    figures = (
        f"{1e3 * times[0]:.3g} ms by our own operations for a million numbers, {1e3 * times[1]:.3g} ms by {_PACKAGE}"
    )
    why = figures if same else f"{_PACKAGE} has other bits"
    log.info("nf4 is made wide by %s: %s", _PACKAGE if wins else "our own operations", why)
    return theirs if wins else ours


def _theirs(dtype: torch.dtype) -> Decode:
    """Return bitsandbytes' way."""
    let_in(_PACKAGE)
    before = logging.getLogger(_PACKAGE).level
    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)  # it warns of kernels that are not asked for
    try:
        from bitsandbytes import functional
    finally:
        logging.getLogger(_PACKAGE).setLevel(before)

    def decode(codes: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
        shape, block = torch.Size((2 * codes.numel(),)), 2 * codes.shape[1]
        table = levels[:16, 1].contiguous()  # what the lower half of a byte stands for
        state = functional.QuantState(scales.reshape(-1), shape, table, block, quant_type="nf4", dtype=dtype)
        wide: Tensor = functional.dequantize_4bit(codes.reshape(-1, 1), state)
        return wide.reshape(-1)

    return decode


def _seconds(decode: Decode, *tensors: Tensor) -> float:
    """Measure one call, the fastest of some."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        decode(*tensors)
        if tensors[0].device.type != "cpu":
            torch.get_device_module(tensors[0].device).synchronize()
        best = min(best, time.perf_counter() - began)
    return best
