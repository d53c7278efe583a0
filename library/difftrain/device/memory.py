"""Memory of a device: how much is in use, and how an allocation that failed is told from other errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GIB = float(1 << 30)
# What allocators, libraries and drivers say where no exception of its own class reaches Python. EL0004 and 207001 are
# CANN's, of buffers that its communication and operators allocate past torch's allocator.
_DEVICE = re.compile(
    r"\b(?:NPU|CUDA|HIP|XPU) out of memory|CUDA error: out of memory|CU(?:BLAS|DNN|FFT|SOLVER)_STATUS_ALLOC_FAILED"
    r"|NCCL error.*out of memory|\bEL0004\b|\berror code is 207(?:001|018)\b|\bACL_ERROR_RT_(?:MEMORY_ALLOCATION|DEVICE_OOM)\b",
    re.IGNORECASE | re.DOTALL,
)
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|host out of memory|Cannot allocate memory", re.IGNORECASE
)
_WANTED = re.compile(r"tried to allocate ([0-9.]+ ?(?:[KMGT]?i?B|bytes)\b)", re.IGNORECASE)

# what is done when memory runs out, as messages say it
CACHING, SAMPLING, EVALUATING = "encoding for the cache", "drawing samples", "evaluating"


class OutOfMemory(RuntimeError):
    """Carry what was being done when memory ran out. on_host: it was the machine's memory, not the device's."""

    def __init__(self, doing: str, requested_memory: str, on_host: bool) -> None:
        super().__init__(f"out of memory while {doing}")
        self.doing = doing
        self.requested_memory = requested_memory  # as the allocator wrote it, "2.00 GiB"; empty where it did not
        self.on_host = on_host


@contextlib.contextmanager
def during(doing: str) -> Iterator[None]:
    """Name what is being done ("drawing samples") for an allocation that fails in it; the innermost name counts.

    Raises OutOfMemory from whatever the allocator raised; other errors pass.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except (RuntimeError, MemoryError) as error:
        where = ran_out(error)
        if where is None:
            raise
        raise OutOfMemory(doing, requested_memory(error), where == "host") from error


def ran_out(error: BaseException) -> str | None:
    """Say whose memory an error is about, "device" or "host"; None where it is another error."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, MemoryError):
        return "host"
    text = str(error)
    if _HOST.search(text):
        return "host"
    return "device" if _DEVICE.search(text) else None


def requested_memory(error: BaseException) -> str:
    """Return how much the failed allocation asked for, as the allocator wrote it."""
    match = _WANTED.search(str(error))
    return match.group(1) if match else ""


@dataclass(frozen=True)
class Memory:
    """A device's memory in GiB. allocated, reserved, peak: of this process; others: what else is taken, by whomever."""

    total: float
    free: float
    allocated: float
    reserved: float
    peak: float

    @property
    def others(self) -> float:
        """Return what this process' allocator does not hold: other processes, the driver, communication buffers."""
        return max(0.0, self.total - self.free - self.reserved)

    def sentence(self) -> str:
        """Say it in one line."""
        return (
            f"{self.total:.2f} GiB in all, {self.allocated:.2f} in use by tensors here (at most {self.peak:.2f}), "
            f"{self.reserved:.2f} reserved for them, {self.others:.2f} by other processes and the driver, {self.free:.2f} free"
        )


def read(module: Any, index: int) -> Memory:
    """Ask a device module of torch (torch.npu, torch.cuda)."""
    free, total = module.mem_get_info(index)
    return Memory(
        total / GIB,
        free / GIB,
        module.memory_allocated(index) / GIB,
        module.memory_reserved(index) / GIB,
        module.max_memory_allocated(index) / GIB,
    )
