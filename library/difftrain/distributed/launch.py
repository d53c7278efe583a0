"""The launch environment: torchrun's own variables, and a complaint by name where they are half set."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from difftrain.contracts import ConfigFault, Fault

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """Say which process this is among how many, and where they meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str = ""
    master_port: int = 0

    @property
    def distributed(self) -> bool:
        """Tell whether a process group is needed."""
        return self.size > 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises ConfigFault where some are set and others missing, or where a value makes no sense.
        """
        env = os.environ if environ is None else environ
        variables = {name: env[name].strip() for name in _NEEDED if env.get(name, "").strip()}
        # MASTER_* alone is what many clusters put into every pod; without RANK or WORLD_SIZE it starts nothing.
        if not any(name in variables for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return cls()
        missing = [name for name in _NEEDED if name not in variables]
        if missing == ["MASTER_ADDR", "MASTER_PORT"] and variables["WORLD_SIZE"] == "1":
            missing = []
        if missing:
            have = ", ".join(f"{name}={value}" for name, value in variables.items())
            raise ConfigFault(
                [
                    Fault(
                        "environment",
                        f"{have} set, but {', '.join(missing)} missing",
                        "start with torchrun, or unset them all for a single process",
                    )
                ]
            )
        # LOCAL_SIZE is the deepspeed launcher's word for it.
        local_size = env.get("LOCAL_WORLD_SIZE", "").strip() or env.get("LOCAL_SIZE", "").strip()
        return cls._checked({**variables, "LOCAL_WORLD_SIZE": local_size})

    @classmethod
    def _checked(cls, variables: Mapping[str, str]) -> Launch:
        faults: list[Fault] = []

        def number(name: str, default: int, low: int, high: int) -> int:
            text = variables.get(name, "")
            if not text:
                return default
            if not text.isdecimal() or not low <= int(text) <= high:
                faults.append(Fault(f"environment {name}", f"got {text!r}", f"must be a number from {low} to {high}"))
                return default
            return int(text)

        size = number("WORLD_SIZE", 1, 1, 1 << 20)
        rank = number("RANK", 0, 0, size - 1)
        local_size = number("LOCAL_WORLD_SIZE", min(size, number("LOCAL_RANK", 0, 0, size - 1) + 1), 1, size)
        local_rank = number("LOCAL_RANK", 0, 0, local_size - 1)
        port = number("MASTER_PORT", 0, 1, 65535)
        if faults:
            raise ConfigFault(faults)
        return cls(rank, size, local_rank, local_size, variables.get("MASTER_ADDR", ""), port)


_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Ask the kernel for SIGTERM when the launcher dies: ranks it leaves behind would train on, or wait for one another.

    Linux only, elsewhere nothing; nothing either for a process that neither torchrun nor deepspeed started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ and "CROSS_RANK" not in os.environ:
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent or parent == 1:  # it died before the kernel knew
        raise SystemExit(128 + int(signal.SIGTERM))
