"""The simulated NPU as a test sees it: what ran on the device, what the host waited for, what was refused.

Importable under `test/simulated_npu/run` only. The device itself is torch_npu's, from its published wheel.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator

from simulator.errors import Refused

__all__ = ["Refused", "counting", "counts", "fallbacks", "host_syncs", "lenient", "reset"]

_before: Counter[str] = Counter()


def _total() -> Counter[str]:
    import torch

    return Counter(json.loads(torch.ops.simulated_npu.counters()))


def counts() -> Counter[str]:
    """Count what ran on the device since the last reset: "aten::mm", "npu::npu_fusion_attention", "copy to the host"."""
    now = _total()
    now.subtract(_before)
    return +now


def reset() -> None:
    """Start counting anew."""
    global _before
    _before = _total()


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Yield a counter that is filled, when the context closes, with what ran inside it."""
    before = _total()
    found: Counter[str] = Counter()
    try:
        yield found
    finally:
        now = _total()
        now.subtract(before)
        found.update(+now)


def fallbacks(found: Counter[str] | None = None) -> Counter[str]:
    """Count the operators that the device does not have, and the host computed."""
    return _starting(found, "fallback ")


def host_syncs(found: Counter[str] | None = None) -> Counter[str]:
    """Count by reason how often the host waited for the device."""
    return _starting(found, "sync ")


def _starting(found: Counter[str] | None, word: str) -> Counter[str]:
    counted = counts() if found is None else found
    return Counter({k.removeprefix(word): n for k, n in counted.items() if k.startswith(word) and n})


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """Let what strict mode refuses happen for a while, counted: fallbacks to the CPU, copies from pageable memory."""
    import torch

    from simulator import switches

    torch.ops.simulated_npu.set_strict(False)
    try:
        yield
    finally:
        torch.ops.simulated_npu.set_strict(switches.strict())
