"""Variables that a device's libraries want before a job starts, each only where the user has not set it.

test/env_npu.sh and test/env_cuda.sh set the same and say why for each; `difftrain launch` has no such script before it. A
test holds the two together.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from importlib import metadata

VARIABLES: dict[str, dict[str, str]] = {
    "npu": {
        "ASCEND_GLOBAL_LOG_LEVEL": "3",
        "ASCEND_SLOG_PRINT_TO_STDOUT": "0",
        "ASCEND_GLOBAL_EVENT_ENABLE": "0",
        "COMBINED_ENABLE": "1",
        "HCCL_WHITELIST_DISABLE": "1",
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "1800",
        "HCCL_BUFFSIZE": "200",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "MULTI_STREAM_MEMORY_REUSE": "1",
    },
    "cuda": {"NCCL_DEBUG": "WARN", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "cpu": {},
}
_ALLOCATOR = "PYTORCH_ALLOC_CONF"  # the general name; torch_npu ends where it finds both
_QUEUE_SINCE = (2, 4)  # of torch_npu: level 2 of the task queue


def launch_variables(kind: str, environ: Mapping[str, str], master: str = "") -> dict[str, str]:
    """Return what is to be added to an environment. master: address of machine 0 where there are several machines."""
    variables = dict(VARIABLES[kind])
    if kind == "npu":
        variables["TASK_QUEUE_ENABLE"] = "2" if _torch_npu() >= _QUEUE_SINCE else "1"
        if environ.get(_ALLOCATOR, "").strip():
            del variables["PYTORCH_NPU_ALLOC_CONF"]
        if address := address_towards(master):  # of several networks HCCL cannot guess the one
            variables["HCCL_IF_IP"] = address
    return {name: value for name, value in variables.items() if not environ.get(name, "").strip()}


def _torch_npu() -> tuple[int, int]:
    try:
        match = re.match(r"(\d+)\.(\d+)", metadata.version("torch_npu"))
    except metadata.PackageNotFoundError:
        match = None
    return (int(match[1]), int(match[2])) if match else (0, 0)


def address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the way to another; empty where there is none or no other. Sends nothing."""
    if not host:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))
            address = str(probe.getsockname()[0])
        except OSError:
            return ""
    return "" if address.startswith("127.") else address
