"""device.memory: an allocation that failed is told from other errors, whoever says so; who was at what is named."""

from __future__ import annotations

import re

import pytest
import torch

from difftrain.device import memory
from difftrain.device.memory import OutOfMemory, during

TORCH = "NPU out of memory. Tried to allocate 2.50 GiB (NPU 0; 60.97 GiB total capacity; 58.00 GiB already allocated)"


@pytest.mark.parametrize(
    ("error", "where", "wanted"),
    [
        (torch.OutOfMemoryError(TORCH), "device", "2.50 GiB"),
        (RuntimeError(TORCH), "device", "2.50 GiB"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total"), "device", "20.00 MiB"),
        (RuntimeError("NPU out of memory. NPUWorkspaceAllocator tried to allocate 64.00 MiB(NPU 1;"), "device", "64.00 MiB"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "device", ""),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device", ""),
        (RuntimeError("HCCL function error: HcclAllReduce, EL0004: [PID: 12] Failed to allocate memory."), "device", ""),
        (RuntimeError("aclrtMalloc, error code is 207001\n[Error]: The device memory is exhausted."), "device", ""),
        (RuntimeError("[enforce fail] data. DefaultCPUAllocator: can't allocate memory: you tried to "
                      "allocate 4096 bytes."), "host", "4096 bytes"),
        (RuntimeError("Malloc pin memory failed, host out of memory, Rried to allocate size: 4096"), "host", ""),
        (MemoryError("Unable to allocate 7.45 GiB for an array"), "host", ""),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None, ""),
        (RuntimeError("aclnnAdd, error code is 507018"), None, ""),
        (ValueError(TORCH), "device", "2.50 GiB"),
    ],
)  # fmt: skip
def test_who_ran_out(error: BaseException, where: str | None, wanted: str) -> None:
    assert memory.ran_out(error) == where
    assert memory.requested_memory(error) == wanted


def test_the_host_really_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert memory.ran_out(caught.value) == "host"


def test_the_innermost_name_counts_and_other_errors_pass() -> None:
    with pytest.raises(OutOfMemory) as caught, during("training"), during("drawing samples"):
        raise torch.OutOfMemoryError(TORCH)
    assert (caught.value.doing, caught.value.requested_memory, caught.value.on_host) == (
        "drawing samples",
        "2.50 GiB",
        False,
    )
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    other = RuntimeError("shapes")
    with pytest.raises(RuntimeError) as caught_too, during("training"):
        raise other
    assert caught_too.value is other


def test_what_others_take_is_what_is_left() -> None:
    class Module:
        mem_get_info = staticmethod(lambda index: (3 << 30, 64 << 30))
        memory_allocated = staticmethod(lambda index: 50 << 30)
        memory_reserved = staticmethod(lambda index: 58 << 30)
        max_memory_allocated = staticmethod(lambda index: 57 << 30)

    found = memory.read(Module, 0)
    assert found.others == 3.0
    figures = [float(figure) for figure in re.findall(r"\d+\.\d\d", found.sentence())]
    assert figures == [64.0, 50.0, 57.0, 58.0, 3.0, 3.0]  # all, in use, its peak, held, of others, free
