"""The compiled parts: a fake CANN, and the kernels that compute on it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# in the order in which they need one another; torch_npu's libraries name all of them
CANN = ("ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "mspti", "hccl")


def folder() -> Path:
    """Return the folder of the compiled libraries; `run` says where it is."""
    return Path(os.environ["SIMULATED_NPU_LIBRARIES"])


def load() -> None:
    """Load the fake CANN for every library that comes later, so that no LD_LIBRARY_PATH is needed."""
    for name in CANN:
        ctypes.CDLL(str(folder() / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
