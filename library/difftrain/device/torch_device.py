"""One device of this process: precision, memory, copies, what it is."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch
from difftrain.device import fused_layers, host, memory, npu_settings, patches

if TYPE_CHECKING:
    from torch import Tensor


_BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Start scales of loss scaling. 128 is the precedent on NPU, where high first scales cost many skipped steps.
_START_SCALE = {"npu": 128.0, "cuda": 65536.0, "cpu": 65536.0}
_GIB = float(1 << 30)


class HalfGradScaler(torch.amp.GradScaler):
    """Scale the loss of weights that are fp16 themselves: small gradients may vanish when they are unscaled."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class Device:
    """Hold one device: kind ("npu", "cuda", "cpu"), its index, how many there are, and why it was taken."""

    def __init__(self, kind: str, index: int = 0, count: int = 1, reason: str = "as asked for") -> None:
        self.kind = kind
        self.index = index
        self.count = count
        self.reason = reason
        self.torch_device = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
        self.module: Any = None if kind == "cpu" else torch.get_device_module(kind)
        if self.module is not None:
            self.module.set_device(index)
        if kind == "npu":
            npu_settings.check_mode()
            patches.apply("torch_npu")

    def __repr__(self) -> str:
        return f"Device({self.torch_device}, {self.count} found, {self.reason})"

    @property
    def backend(self) -> str:
        """Name the process group backend for tensors on this device."""
        return _BACKENDS[self.kind]

    @property
    def pin(self) -> bool:
        """Tell whether host batches belong in pinned memory."""
        return self.kind != "cpu"

    @property
    def fused_optimizer(self) -> bool:
        """Tell whether torch's fused optimizer kernels run here; they take the loss scale and found_inf on the device."""
        return True

    @property
    def adamw_choice(self) -> str:
        """Say which AdamW runs here, and why; empty where there is but one."""
        return fused_layers.CHOICE if self.kind == "npu" else ""

    def allow_tf32(self) -> str:
        """Let fp32 matrix products round their inputs to TF32; return what is to be said of it."""
        if self.kind != "cuda":
            return f"TF32 was allowed, and has no effect on {self.kind}"
        torch.backends.cuda.matmul.allow_tf32 = True
        return "matrix products of fp32 round their inputs to TF32, on devices that have it"

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """Return the context of mixed precision: "no", "fp16" or "bf16"."""
        if precision == "no":
            return contextlib.nullcontext()
        return torch.autocast(self.kind, dtype=_DTYPES[precision])

    def scaler(self, precision: str, *, half_gradients: bool = False) -> torch.amp.GradScaler | None:
        """Return the loss scaler that fp16 needs, or None. Raises ConfigFault where overflow could not be seen.

        half_gradients: unscale gradients that are fp16 themselves, which torch's own scaler refuses.
        """
        if precision != "fp16":
            return None
        if self.kind == "npu":
            npu_settings.check_environment()
            npu_settings.check_device(self.torch_device)
        kind = HalfGradScaler if half_gradients else torch.amp.GradScaler
        return kind(self.kind, init_scale=_START_SCALE[self.kind])

    def why_not_compiled(self, backend: str) -> str:
        """Say why a compile backend cannot be used here; empty where it can."""
        return why_not(backend, self.kind)

    def why_compile_is_off(self, backend: str) -> str:
        """Say why a compile backend is left out here though it was asked for; empty where it is used."""
        return why_off(backend, self.kind)

    def sweep_compiled(self, backend: str) -> None:
        """Delete what a killed run left half made in a compiler's cache."""
        sweep(backend, self.kind)

    def compile_cost(self, backend: str) -> str:
        """Say what compiling takes here."""
        return cost(backend, self.kind)

    def synchronise(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.module is not None:
            self.module.synchronize(self.torch_device)

    def marker(self) -> Callable[[], Any] | None:
        """Return a function that records an event with timing in the device's stream; None where work is not queued."""
        if self.module is None:
            return None

        def mark() -> Any:
            event = self.module.Event(enable_timing=True)
            event.record()
            return event

        return mark

    def agree_on_waiting(self, timeout_min: float | None) -> str:
        """Let the device's collectives give up shortly before ours do; call before the first group is made.

        timeout_min: as asked for, or None. Returns the sentence to say where a variable of the user's was overruled.
        """
        return npu_settings.agree_on_waiting(timeout_min) if self.kind == "npu" else ""

    def memory(self) -> memory.Memory | None:
        """Say how the device's memory is used; None for the CPU."""
        return None if self.module is None else memory.read(self.module, self.index)

    def peak_memory_gib(self, *, exact: bool = True) -> float:
        """Return the peak since the last reset: of the allocator, or on the CPU of this process's resident memory.

        exact: else, on the CPU, as it was a second ago at most.
        """
        if self.module is None:
            return (host.peak_rss_bytes() if exact else host.recent_peak_rss_bytes()) / _GIB
        return self.module.max_memory_allocated(self.torch_device) / _GIB

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        if self.module is None:
            host.reset_peak_rss()
        else:
            self.module.reset_peak_memory_stats(self.torch_device)

    def seed(self, n: int) -> None:
        """Seed the generator that modules draw their dropout from; no synchronisation."""
        if self.module is None:
            torch.default_generator.manual_seed(n)
        else:
            self.module.manual_seed(n)

    def put(self, tensor: Tensor) -> Tensor:
        """Copy one host tensor to the device without waiting; pageable memory is pinned first."""
        if self.module is None:
            return tensor
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.torch_device, non_blocking=True)

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch with features, draws and mask on the device; record ids stay on the host."""
        if self.module is None:
            return batch
        return dataclasses.replace(
            batch,
            features={name: self.put(tensor) for name, tensor in batch.features.items()},
            draws={name: self.put(tensor) for name, tensor in batch.draws.items()},
            loss_mask=None if batch.loss_mask is None else self.put(batch.loss_mask),
        )

    def describe(self) -> dict[str, Any]:
        """Say what this is, for reports: name, count, versions, threads."""
        about: dict[str, Any] = {
            "kind": self.kind,
            "index": self.index,
            "count": self.count,
            "reason": self.reason,
            "name": self._name(),
            "torch": torch.__version__,
            "torch_commit": (torch.version.git_version or "")[:12],
            "threads": torch.get_num_threads(),
            "host": host.describe(),
        }
        if self.kind == "cuda":
            about |= {
                "cuda": torch.version.cuda or torch.version.hip,
                "driver": host.nvidia_driver(),
                "cudnn": torch.backends.cudnn.version(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            }
        if self.kind == "npu":
            import torch_npu

            about |= {"torch_npu": torch_npu.__version__, "cann": host.cann_version(), "driver": host.npu_driver()}
        if self.module is not None:
            about["memory_gib"] = round(self.module.get_device_properties(self.index).total_memory / _GIB, 2)
        return about

    def _name(self) -> str:
        return host.cpu_name() if self.module is None else str(self.module.get_device_name(self.index))


# --- What compilers need of a device, and what they cost there


_LINKING_S = 30.0  # far longer than a linker takes


def why_not(backend: str, kind: str) -> str:
    """Say why a compile backend cannot be used on a kind of device; empty where it can."""
    if backend == "cudagraphs" and kind != "cuda":
        return f"it records CUDA graphs, and this run is on {kind}"
    if backend != "inductor" or why_off(backend, kind):
        return ""
    if kind == "cpu":
        from torch._inductor import exc
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            return "on a CPU it needs a C++ compiler, and none is found (install g++, or name one in CXX)"
        return ""
    from torch.utils._triton import has_triton

    return "" if has_triton() else f"on {kind} it needs Triton, which is not installed"


def why_off(backend: str, kind: str) -> str:
    """Say why a compile backend is left out on a kind of device though it was asked for; empty where it is used."""
    if kind == "npu" and backend == "inductor":
        return "what inductor makes for an NPU is not verified, neither its results nor its speed; blocks run operator by operator"
    return ""


def cost(backend: str, kind: str) -> str:
    """Say what compiling takes, as measured with torch 2.13 on blocks of SDXL."""
    if backend == "inductor" and kind == "cpu":
        return (
            "a graph has about 7 kernels, each about 2 s of C++ compilation on one core: minutes before the first step, "
            "less where they are cached from an earlier run"
        )
    if backend == "inductor":
        return "seconds a graph before the first step, less where they are cached from an earlier run"
    return "about a second a graph before the first step"


def sweep(backend: str, kind: str) -> int:
    """Delete what a killed run left half made in inductor's cache, which no later run could load; return how many.

    A library without content is one whose linker was killed: the cache takes it for finished.
    """
    if backend != "inductor" or kind != "cpu":
        return 0
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    before, count = time.time() - _LINKING_S, 0
    for path in Path(cache_dir()).glob("*/*.so"):
        with contextlib.suppress(OSError):  # another process may sweep too
            stat = path.stat()
            if stat.st_size == 0 and stat.st_mtime < before:
                path.unlink()
                count += 1
    return count
