"""What compilers need of a device, and what they cost there."""

from __future__ import annotations


def why_not(backend: str, kind: str) -> str:
    """Say why a compile backend cannot be used on a kind of device; empty where it can."""
    if backend == "cudagraphs" and kind != "cuda":
        return f"it records CUDA graphs, and this run is on {kind}"
    if backend != "inductor":
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
