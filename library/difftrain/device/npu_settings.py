"""Settings of an NPU that training depends on: whether an fp16 overflow can be seen, and how long a group waits.

An NPU may be set to saturate instead of overflowing; loss scaling would then never see an overflow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault

if TYPE_CHECKING:
    import torch


_ENABLE, _DISABLE = "INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE"
_LARGE = 60000.0  # of 65504


def check_environment() -> None:
    """Refuse variables that switch the INF/NAN mode of an NPU off. Raises ConfigFault.

    The second one is the switch of Atlas A2 and A3; there the first by itself stops every operator, and older NPUs
    know the first alone.
    """
    faults = [
        Fault(
            f"environment {name}",
            f"{off} makes the NPU saturate instead of overflow, so loss scaling would never see an overflow",
            f"unset it, {otherwise}",
        )
        for name, off, otherwise in (
            (_ENABLE, "0", f"or train with {option('training.mixed_precision')}=no"),
            (_DISABLE, "1", f"or train with {option('training.mixed_precision')}=bf16"),
        )
        if os.environ.get(name, "").strip() == off
    ]
    if faults:
        raise ConfigFault(faults)


def check_mode() -> None:
    """Refuse a variable with which torch_npu would refuse every operator, in any precision. Raises ConfigFault."""
    import torch_npu

    try:
        torch_npu.npu.utils.is_support_inf_nan()
    except RuntimeError as error:
        if _ENABLE not in str(error):
            raise
        what = f"{os.environ.get(_ENABLE)} is not supported by this NPU, in any precision"
        remedy = f"unset it; {_DISABLE}=1 is the switch of this NPU, and with it fp16 cannot be trained"
        raise ConfigFault([Fault(f"environment {_ENABLE}", what, remedy)]) from error


def check_device(device: torch.device) -> None:
    """Overflow once on the device, in its vector and its matrix units, and look. Raises ConfigFault where it saturates.

    The host waits for the device: call it before training only.
    """
    import torch

    large = torch.full((16, 16), _LARGE, dtype=torch.float16, device=device)
    values = torch.stack([(large + large).float().amax(), (large @ large).float().amax()]).tolist()
    if any(value < float("inf") for value in values):
        raise ConfigFault(
            [
                Fault(
                    f"{option('training.mixed_precision')}=fp16",
                    f"{_LARGE:g} + {_LARGE:g} is {values[0]:g} in fp16 on {device}: it saturates instead of overflowing "
                    "(no INF/NAN mode), so loss scaling would never see an overflow",
                    f"unset {_ENABLE} and {_DISABLE}; where the device has no such mode, {option('training.mixed_precision')}=bf16 or no",
                )
            ]
        )


# --- What a device's own communication library must know before the first group is made


# Seconds. HCCL's own: how long a collective waits for a rank that does not come, and how long ranks try to connect.
_EXEC, _CONNECT = "HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT"
_DEFAULT_S = 1800  # torch_npu's own group then waits 1800 s longer than HCCL
CONNECT_RANGE_S = (120, 7200)  # what HCCL takes
# HCCL's error names the rank and the link that failed, the group's watchdog only ends the process: so HCCL is to be the
# first, which torch_npu warns of where it is not. It takes up to 20 s more to tell every rank.
_HCCL_SHARE = 0.9


def agree_on_waiting(timeout_min: float | None) -> str:
    """Set HCCL's time-outs a tenth below the group's; torch_npu reads them when a group is made.

    timeout_min: as asked for by the user, which counts more than variables that a script has set; None leaves those.
    Returns the sentence to say where variables were overruled; empty where none was.
    """
    if timeout_min is None:
        os.environ.setdefault(_EXEC, str(_DEFAULT_S))
        os.environ.setdefault(_CONNECT, str(_DEFAULT_S))
        return ""
    seconds = max(1, int(timeout_min * 60 * _HCCL_SHARE))
    low, high = CONNECT_RANGE_S
    meant = {_EXEC: str(seconds), _CONNECT: str(min(max(seconds, low), high))}
    choices = [
        f"{name} is {value} s instead of the environment's {os.environ[name]}"
        for name, value in meant.items()
        if os.environ.get(name, value) != value
    ]
    os.environ.update(meant)
    return f"{option('training.ddp_timeout_min')}={timeout_min:g}: {', '.join(choices)}" if choices else ""
