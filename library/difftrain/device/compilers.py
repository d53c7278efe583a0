"""What compilers need of a device, and what they cost there."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

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

    return "" if has_triton() else f"on {kind} it needs Triton, which is not there"


def why_off(backend: str, kind: str) -> str:
    """Say why a compile backend is left out on a kind of device though it was asked for; empty where it is used."""
    if kind == "npu" and backend == "inductor":
        return (
            "what inductor makes for an NPU has not been shown to be right, nor fast; blocks run operator by operator"
        )
    return ""


def cost(backend: str, kind: str) -> str:
    """Say what compiling takes, as measured with torch 2.13 on blocks of SDXL."""
    if backend == "inductor" and kind == "cpu":
        return (
            "a graph has about 7 kernels, each about 2 s of a C++ compiler on one core: minutes before the first step, "
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
            found = path.stat()
            if found.st_size == 0 and found.st_mtime < before:
                path.unlink()
                count += 1
    return count
