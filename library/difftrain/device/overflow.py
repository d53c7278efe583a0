"""Whether an fp16 overflow can be seen: loss scaling depends on it, and an NPU may be set to saturate instead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from difftrain.contracts import ConfigFault, Fault

if TYPE_CHECKING:
    import torch

_REMEDY = "or train with --mixed_precision=bf16"
_LARGE = 60000.0  # of 65504


def check_environment() -> None:
    """Refuse variables that switch the INF/NAN mode of an NPU off. Raises ConfigFault."""
    faults = [
        Fault(
            f"environment {name}",
            f"{off} makes the NPU saturate instead of overflow, so loss scaling would never see an overflow",
            f"unset it, {_REMEDY}",
        )
        for name, off in (("INF_NAN_MODE_ENABLE", "0"), ("INF_NAN_MODE_FORCE_DISABLE", "1"))
        if os.environ.get(name, "").strip() == off
    ]
    if faults:
        raise ConfigFault(faults)


def check_device(device: torch.device) -> None:
    """Overflow once on the device, in its vector and its matrix units, and look. Raises ConfigFault where it saturates.

    The host waits for the device: call it before training only.
    """
    import torch

    large = torch.full((16, 16), _LARGE, dtype=torch.float16, device=device)
    found = torch.stack([(large + large).float().amax(), (large @ large).float().amax()]).tolist()
    if any(value < float("inf") for value in found):
        raise ConfigFault(
            [
                Fault(
                    "--mixed_precision=fp16",
                    f"{_LARGE:g} + {_LARGE:g} is {found[0]:g} in fp16 on {device}: it saturates instead of overflowing "
                    "(no INF/NAN mode), so loss scaling would never see an overflow",
                    "take a device, driver and CANN with that mode, --mixed_precision=bf16, or --mixed_precision=no",
                )
            ]
        )
