"""The switches of the simulated device: environment variables, so that every child process has them too."""

from __future__ import annotations

import os


def strict() -> bool:
    """Tell whether what hardware does slowly or inexactly is refused: fallbacks, averages, copies that must wait."""
    return os.environ.get("SIMULATED_NPU_STRICT", "1") != "0"


def cann() -> tuple[int, ...]:
    """Return the version of the CANN that is played: 8.5.0, or an older one whose limits are tighter."""
    return tuple(int(part) for part in os.environ.get("SIMULATED_NPU_CANN", "8.5.0").split("."))


def saturates() -> bool:
    """Tell whether fp16 saturates at 65504 instead of overflowing (INF_NAN_MODE_ENABLE=0)."""
    return os.environ.get("SIMULATED_NPU_SATURATE", "0") == "1"


def counts_file() -> str:
    """Return the prefix of the files that processes write their counters to when they end, or nothing."""
    return os.environ.get("SIMULATED_NPU_COUNTS", "")
