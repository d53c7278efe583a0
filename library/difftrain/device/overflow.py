"""Whether an fp16 overflow can be seen: loss scaling depends on it, and an NPU may be set to saturate instead."""

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
        what = f"{os.environ.get(_ENABLE)} is not taken by this NPU, in any precision"
        remedy = f"unset it; {_DISABLE}=1 is the switch of this NPU, with which fp16 cannot be trained"
        raise ConfigFault([Fault(f"environment {_ENABLE}", what, remedy)]) from error


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
                    f"{option('training.mixed_precision')}=fp16",
                    f"{_LARGE:g} + {_LARGE:g} is {found[0]:g} in fp16 on {device}: it saturates instead of overflowing "
                    "(no INF/NAN mode), so loss scaling would never see an overflow",
                    f"unset {_ENABLE} and {_DISABLE}; where the device has no such mode, {option('training.mixed_precision')}=bf16 or no",
                )
            ]
        )
