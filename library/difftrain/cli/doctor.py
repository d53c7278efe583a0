"""`difftrain doctor`: what is installed, which devices are there, and whether they compute what they should."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from difftrain.cli.words import exactly
from difftrain.config.door import guard
from difftrain.contracts.errors import DifftrainError

if TYPE_CHECKING:
    from difftrain.device import Device

# the floors of pyproject.toml, which is not there where the package is installed; a test holds them together
REQUIRED = {
    "torch": "2.7",
    "diffusers": "0.36",
    "transformers": "4.51",
    "safetensors": "0.4.5",
    "scipy": "1.11",
    "pydantic": "2.7",
    "huggingface_hub": "0.30",
    "numpy": "1.26",
    "Pillow": "10.3",
    "simplejpeg": "1.7",
    "imagecodecs": "2024.6",
    "pyarrow": "15",
    "tensorboard": "2.15",
    "tqdm": "4.66",
}
OPTIONAL = {"wandb": "--log_with=wandb", "torch_npu": "training on NPU"}
HARMFUL = {
    "torchvision": "no build of it fits the CPU build of torch, and then diffusers cannot be imported",
    "timm": "it brings torchvision",
    "open_clip_torch": "it brings torchvision and timm",
}


def main(argv: list[str]) -> int:
    """Print what was found; 1 where something that training needs is missing or wrong."""

    def work() -> int:
        exactly("doctor", argv)
        bad = 0
        for verdict, line in examine():
            print(f"{verdict:>7}  {line}", flush=True)
            bad += verdict == "WRONG"
        print(f"\n{bad} thing{'s' if bad != 1 else ''} to mend" if bad else "\nready to train")
        return 1 if bad else 0

    return guard("difftrain doctor", work)


def examine() -> Iterator[tuple[str, str]]:
    """Yield (verdict, sentence): ok, WRONG, or a dash where nothing is wrong with either answer."""
    yield "-", f"Python {platform.python_version()}, {platform.platform()}"
    yield from packages()
    if any(installed(name) is None for name in ("torch", "numpy")):
        return
    from difftrain.device.choice import hold_autoload

    hold_autoload()
    yield from devices()


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def packages() -> Iterator[tuple[str, str]]:
    """Judge what is installed."""
    for name, least in REQUIRED.items():
        version = installed(name)
        if version is None:
            yield "WRONG", f"{name} is not installed: pip install -r requirements.txt"
        elif numbers(version) < numbers(least):
            yield "WRONG", f"{name} {version} is older than {least}"
        else:
            yield "ok", f"{name} {version}"
    for name, use in OPTIONAL.items():
        yield "-", f"{name} {installed(name) or 'is not installed'} (for {use})"
    for name, why in HARMFUL.items():
        if version := installed(name):
            yield "-", f"{name} {version} is installed: {why}"


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, for comparing."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split("."))  # type: ignore[index]


def devices() -> Iterator[tuple[str, str]]:
    """Look for devices, and check the one that training would take."""
    from difftrain.device import choose
    from difftrain.device.choice import KINDS, find

    for kind in KINDS:
        found = find(kind)
        yield "-", f"{kind}: {found.count} found" + (f" ({found.why_not})" if found.why_not else "")
    try:
        device = choose("auto")
    except DifftrainError as error:
        yield "WRONG", str(error).strip()
        return
    about = {
        name: value for name, value in device.describe().items() if value and name not in ("host", "kind", "index")
    }
    yield "ok", f"training would take {device.torch_device}: " + ", ".join(f"{k} {v}" for k, v in about.items())
    for check in (noise, attention, precisions, speed, compiler):
        yield from _told(check, device)


def _told(check: Callable[[Device], tuple[str, str]], device: Device) -> Iterator[tuple[str, str]]:
    """Do one check; what it raises is its verdict."""
    try:
        yield check(device)
    except Exception as error:
        yield "WRONG", f"{check.__name__}: {type(error).__name__}: {error}"


def noise(device: Device) -> tuple[str, str]:
    """Draws are the same on every machine where the table of quantiles is."""
    from difftrain.diffusion.draws import STREAM_VERSION, key_of, normal

    draw = normal(0, key_of("doctor"), 0, "noise", (4,))
    return "ok", f"noise: stream {STREAM_VERSION}, the table of quantiles is that of every machine ({draw[0]:.6f} ...)"


def attention(device: Device) -> tuple[str, str]:
    """The attention that training uses is the formula's, within the precision's rounding."""
    import torch

    from difftrain.device import attention as attend
    from difftrain.device import counting

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 77, 64, generator=generator) for _ in range(3))
    exact = (q @ k.mT / 8).softmax(-1) @ v
    errors = {}
    for name, dtype, bound in (("fp32", torch.float32, 1e-4), ("bf16", torch.bfloat16, 5e-2)):
        query, key, value = (each.to(device.torch_device, dtype) for each in (q, k, v))
        with counting() as tally:
            error = float((attend(query, key, value).float().cpu() - exact).abs().max())
        errors[name] = (error < bound, f"{name} {error:.1e} off by {', '.join(tally)}")
    verdict = "ok" if all(fine for fine, _ in errors.values()) else "WRONG"
    return verdict, f"attention against its formula: {'; '.join(said for _, said in errors.values())}"


def precisions(device: Device) -> tuple[str, str]:
    """Mixed precision gives finite gradients."""
    import torch

    works = []
    for precision in ("no", "bf16", "fp16"):
        weight = torch.ones(64, 64, device=device.torch_device, requires_grad=True)
        with device.autocast(precision):
            loss = (weight @ weight).float().mean()
        loss.backward()
        assert weight.grad is not None
        if bool(torch.isfinite(weight.grad).all()):
            works.append(precision)
    return "ok" if "no" in works else "WRONG", f"mixed_precision that works here: {', '.join(works)}"


def speed(device: Device) -> tuple[str, str]:
    """The matmul rate, which MFU's neighbour in the reports is measured against."""
    from difftrain.report.peaks import measure_matmul

    rate = measure_matmul(device.torch_device, "no", device.synchronise, budget_s=1.0)
    return "-", f"matmul in fp32: {rate / 1e12:.3f} TFLOP/s"


def compiler(device: Device) -> tuple[str, str]:
    """--torch_compile needs a C++ compiler."""
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return (
        "-",
        f"--torch_compile: {'a C++ compiler is there' if found else 'needs a C++ compiler, and none is on PATH'}",
    )
