"""The only room that says npu, cuda or cpu: choice, autocast, scaler, memory, copies, attention.

The way of a process to its device:
 1. launch_variables.py   variables that must be set before a job starts
 2. choice.py       which device, and why; ascend.py why it is not an NPU, versions.py what fits together
 3. npu_settings.py, patches.py, fused_layers.py   settings and patches, applied once
 4. torch_device.py   the device in use: precision, memory, copies
 5. attend.py       the one attention function; attention_modules.py gives it to every module
 6. compiling.py    blocks compiled where a backend can
 7. memory.py, step_memory.py, offload.py, block_swap.py   memory in use, foreseen, and moved to the host
health/ holds the doctor's checks. Importing this package imports no torch, so that launchers can ask
`python -m difftrain.device` quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from difftrain.device.attend import AttentionCalls, attention, why_not_fused
    from difftrain.device.attention_modules import use_attention
    from difftrain.device.choice import calm_threads, choose, hold_autoload, probe
    from difftrain.device.counters import counting
    from difftrain.device.torch_device import Device

# Modules are named unlike what they hold: importing a submodule binds its name here.
_HOMES = {
    "AttentionCalls": "attend",
    "attention": "attend",
    "counting": "counters",
    "why_not_fused": "attend",
    "choose": "choice",
    "calm_threads": "choice",
    "hold_autoload": "choice",
    "probe": "choice",
    "use_attention": "attention_modules",
    "Device": "torch_device",
}

__all__ = [
    "AttentionCalls",
    "Device",
    "attention",
    "calm_threads",
    "choose",
    "counting",
    "hold_autoload",
    "probe",
    "use_attention",
    "why_not_fused",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
