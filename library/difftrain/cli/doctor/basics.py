"""Small facts that training hangs on: the draws, the compiler, and how fast the device multiplies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from difftrain.device.health.finding import Context, Finding


def noise(context: Context) -> Iterator[Finding]:
    """Draws are the same on every machine where the table of quantiles is."""
    from difftrain.diffusion.draws import STREAM_VERSION, key_of, normal

    draw = normal(0, key_of("doctor"), 0, "noise", (4,))
    yield Finding(
        "ok", f"noise: stream {STREAM_VERSION}, the table of quantiles is every machine's ({draw[0]:.6f} ...)"
    )


def compiler(context: Context) -> Iterator[Finding]:
    """Say whether --torch_compile works here."""
    why = context.device.why_compile_is_off("inductor") or context.device.why_not_compiled("inductor")
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if why:
        yield Finding("note", f"--torch_compile: {why}", "nothing: training goes on without it")
    elif not found:
        remedy = "install g++, or train without it"
        yield Finding("note", "--torch_compile needs a C++ compiler, and none is on PATH", remedy)
    else:
        yield Finding("ok", "--torch_compile: a C++ compiler is there")


def speed(context: Context) -> Iterator[Finding]:
    """Measure the matmul rate, which MFU in the reports is measured against."""
    from difftrain.report.peaks import measure_matmul

    device = context.device
    for name in ("no",) if device.module is None else ("no", "bf16"):
        rate = measure_matmul(device.torch_device, name, device.synchronise, budget_s=1.0)
        word = "fp32" if name == "no" else name
        yield Finding("ok", f"matmul in {word}: {rate / 1e12:.3f} TFLOP/s", about=word)
