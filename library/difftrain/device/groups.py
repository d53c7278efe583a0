"""What a device's own communication library must know before the first group is made."""

from __future__ import annotations

import os

from difftrain.config.spellings.spelling import option

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
    said = [
        f"{name} is {value} s instead of the environment's {os.environ[name]}"
        for name, value in meant.items()
        if os.environ.get(name, value) != value
    ]
    os.environ.update(meant)
    return f"{option('training.ddp_timeout_min')}={timeout_min:g}: {', '.join(said)}" if said else ""
