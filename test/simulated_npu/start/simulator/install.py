"""Put the simulator's kernels in the place of torch_npu's, through the dispatcher."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from simulator import libraries, switches
from simulator.dtypes import FALLS_BACK

# Kernels that touch no element stay the wheel's own: memory, sizes, streams. They work on the fake CANN as they are.
GENUINE = {
    "_pin_memory", "_reshape_alias", "as_strided", "as_strided_", "empty.memory_format", "empty_like", "empty_strided",
    "empty_with_format", "empty_with_swapped_memory", "get_npu_format", "get_storage_size", "is_pinned", "is_set_to",
    "new_empty_strided", "record_stream", "resize_", "resize_as_", "set_", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "squeeze", "squeeze.dim", "unfold",
    "unsafe_empty_with_format", "unsqueeze", "view", "view_as_complex", "view_as_real",
}  # fmt: skip
# kernels of our own beside the one for all, in C++ (kernels.cpp) and in Python (COMPOSITES)
OWN = {"copy_", "_copy_from_and_resize", "_to_copy", "_local_scalar_dense", "scaled_dot_product_attention"}
# torch's autograd asks for these because torch_npu registers matmul and linear as kernels; the CPU has none
COMPOSITES = {
    "aten::matmul_backward": "simulator.composites:matmul_backward",
    "aten::linear_backward": "simulator.composites:linear_backward",
}
NO_DEVICE_KERNEL = {"aten::_foobar", "aten::_make_dep_token"}  # torch's own tests and tokens
_DTYPES = {
    "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64,
    "Half": torch.float16, "Float": torch.float32, "Double": torch.float64, "ComplexHalf": torch.complex32,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128, "Bool": torch.bool,
    "BFloat16": torch.bfloat16, "Float8_e5m2": torch.float8_e5m2, "Float8_e4m3fn": torch.float8_e4m3fn,
    "UInt16": torch.uint16, "UInt32": torch.uint32, "UInt64": torch.uint64,
}  # fmt: skip
_kept: list[torch.library.Library] = []  # registrations live as long as these


def install() -> None:
    """Replace the kernels, the fused operators and the process group; once in a process."""
    torch.ops.load_library(str(libraries.folder() / "libsimulated_npu.so"))
    replaced, fallbacks = operators()
    _judge()
    torch.ops.simulated_npu.install(replaced, fallbacks, switches.strict())
    from simulator import fused

    _python_kernels({**COMPOSITES, **fused.REFERENCES})
    _routed()
    from simulator import hccl

    hccl.install()
    if switches.counts_file():
        atexit.register(_write_counts)
    if torch.npu.is_available():
        torch.npu.set_compile_mode(jit_compile=False)


def operators() -> tuple[list[str], list[str]]:
    """Return the operators whose kernels are replaced, and those that the device lacks and the CPU has.

    Among the latter are those whose kernel on the device does nothing but ask the CPU.
    """
    registered = {key: set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in _KEYS}
    device = {name for name in registered["PrivateUse1"] if name.startswith("aten::") and _has_schema(name)}
    ours = {f"aten::{name}" for name in GENUINE | OWN} | COMPOSITES.keys()
    elsewhere = set().union(*(registered[key] for key in _KEYS[2:]))
    lacking = {name for name in registered["CPU"] if name.startswith("aten::")} - device - elsewhere - ours
    asking = {name for name in FALLS_BACK if _has_schema(name)}
    return sorted(device - ours - asking), sorted((lacking | asking) - NO_DEVICE_KERNEL)


_KEYS = (
    "PrivateUse1",
    "CPU",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def _has_schema(name: str) -> bool:
    """Tell whether an operator exists: torch_npu also registers kernels under names that were never defined."""
    base, _, overload = name.partition(".")
    try:
        torch._C._get_schema(base, overload)
    except RuntimeError:
        return False
    return True


def _judge() -> None:
    """Answer what the kernels ask of the policy: is this operator with these dtypes something the device takes?"""
    from simulator import policy

    library = torch.library.Library("simulated_npu", "IMPL")
    cann = switches.cann()

    def judge(op: str, dtypes: list[str], devices: list[str], dims: list[int], strict: bool) -> bool:
        there = [place == "npu" for place in devices]
        found = tuple(_DTYPES.get(name, name) for name, here in zip(dtypes, there) if here)
        numbers = tuple(number for number, here in zip(dims, there) if here)
        policy.check(op, found, cann=cann, strict=strict, dims=numbers)
        return True

    library.impl("judge", judge, "CompositeExplicitAutograd")
    _kept.append(library)


def _python_kernels(table: dict[str, str]) -> None:
    for name, place in table.items():
        namespace, _, op = name.partition("::")
        library = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden is the point
            library.impl(op, _on_host(name, place), "PrivateUse1")
        _kept.append(library)


def _routed() -> None:
    """Give scaled_dot_product_attention its way to the fused operator, with and without autograd."""
    from simulator.composites import scaled_dot_product_attention

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl("scaled_dot_product_attention", scaled_dot_product_attention, key)
    _kept.append(library)


def _on_host(name: str, place: str) -> Callable[..., Any]:
    """Return a kernel that gives a reference the host's view of device tensors, and puts its results on the device."""

    @functools.cache
    def reference() -> Callable[..., Any]:
        module, _, attribute = place.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def kernel(*args: Any, **options: Any) -> Any:
        torch.ops.simulated_npu.count(name)
        devices: list[torch.device] = []
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def down(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.device.type != "npu":
                    if value.ndim and name.startswith("npu::"):
                        raise RuntimeError(
                            f"Expected all tensors to be on the same device, got one on the CPU (in {name})"
                        )
                    return value
                devices.append(value.device)
                host = torch.ops.simulated_npu.host(value)
                seen.append((value, host))
                return host
            if isinstance(value, list | tuple):
                return type(value)(down(each) for each in value)
            return value

        def up(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                for device, host in seen:
                    if value is host:
                        return device
                return torch.ops.simulated_npu.to_device(value, devices[0]) if value.device.type == "cpu" else value
            if isinstance(value, list | tuple):
                return type(value)(up(each) for each in value)
            return value

        given, named = down(args), {key: down(value) for key, value in options.items()}
        if len({str(each) for each in devices}) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} (in {name})")
        with torch.no_grad():
            return up(reference()(*given, **named))

    return kernel


def _write_counts() -> None:
    import simulator

    path = Path(f"{switches.counts_file()}.{os.getpid()}.json")
    path.write_text(json.dumps(simulator.counts(), indent=1), encoding="utf-8")
