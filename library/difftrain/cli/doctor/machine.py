"""What the machine allows: files, shared memory, threads, and the variables that start a job."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import import_module, metadata

from difftrain.contracts.errors import ConfigFault
from difftrain.device import host
from difftrain.device.choice import hide_unusable_npu
from difftrain.device.health import Context, HealthFinding
from difftrain.device.versions import numbers
from difftrain.distributed.launch import Launch

_SHARED = "/dev/shm"
_LEAST_SHARED_GIB = 1.0  # docker's default is 64 MiB
_FEW_FILES, _ENOUGH_FILES = 256, 4096


def check_machine(context: Context) -> Iterator[HealthFinding]:
    """Look at limits that end a run hours after its start."""
    about = host.describe()
    yield HealthFinding(
        "ok", f"{about['cores']} cores of {about['cpu']}, {about['memory_gib']} GiB of memory", about="host"
    )
    yield from _files()
    yield from _shared()
    yield from _threads(int(about["cores"]))


def _files() -> Iterator[HealthFinding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else min(hard, 65536)
        yield HealthFinding(
            "wrong" if soft < _FEW_FILES else "note",
            f"a process may open {soft} files: workers, tars and caches of large datasets may need more",
            f"ulimit -n {most}",
            "files",
        )
    else:
        yield HealthFinding("ok", f"a process may open {'any number of' if soft < 0 else soft} files", about="files")


def _shared() -> Iterator[HealthFinding]:
    if not os.path.isdir(_SHARED):  # noqa: PTH112 - a macOS has none, and needs none
        return
    total = shutil.disk_usage(_SHARED).total / 2**30
    if total < _LEAST_SHARED_GIB:
        what = f"/dev/shm holds {total:.2f} GiB: workers pass batches through it, and die of SIGBUS when it is full"
        remedy = "docker run --shm-size=16g; until then --max_data_loader_n_workers=0"
        yield HealthFinding("note", what, remedy, "shared_memory")
    else:
        yield HealthFinding("ok", f"/dev/shm holds {total:.1f} GiB", about="shared_memory")


def _threads(cores: int) -> Iterator[HealthFinding]:
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if text and not text.split(",")[0].isdecimal():
        yield HealthFinding("wrong", f"OMP_NUM_THREADS={text} is not a number", "unset it", "threads")
    elif text and int(text.split(",")[0]) > cores:
        what = f"OMP_NUM_THREADS={text}, and this process may use {cores} cores: the threads wait for each other"
        yield HealthFinding(
            "note", what, f"export OMP_NUM_THREADS={cores}, or fewer for each of several ranks", "threads"
        )


def launch(context: Context) -> Iterator[HealthFinding]:
    """Judge the variables that say which rank a process is."""
    try:
        environment = Launch.from_environment()
    except ConfigFault as error:
        for fault in error.faults:
            yield HealthFinding("wrong", f"{fault.where}: {fault.what}", fault.remedy or "start with torchrun")
        return
    text = (
        f"rank {environment.rank} of {environment.size}" if environment.distributed else "no launcher: a single process"
    )
    yield HealthFinding("ok", f"launch variables: {text}")


# --- Packages: their versions, and whether those that training needs can be imported


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
    "google-crc32c": "1.5",
    "Pillow": "10.3",
    "simplejpeg": "1.7",
    "imagecodecs": "2024.6",
    "pyarrow": "15",
    "av": "14",
    "fsspec": "2023.12",
    "tensorboard": "2.15",
    "tqdm": "4.66",
    "ftfy": "6.1",
    "peft": "0.17",
}
OPTIONAL = {
    "wandb": "--log_with=wandb",
    "swanlab": "--log_with=swanlab",
    "mlflow": "--log_with=mlflow",
    "accelerate": "--engine=accelerate",
    "fairscale": "--optimizer_type=oss with --engine=accelerate",
    "deepspeed": "--engine=accelerate with ZeRO",
}
HARMFUL = {
    "torchvision": "no build of it fits the CPU build of torch, and then diffusers cannot be imported",
    "timm": "it brings torchvision",
    "open_clip_torch": "it brings torchvision and timm",
}
_INSTALL = "pip install -r requirements.txt"
# what training takes of them: importing the package alone would load nothing
_IMPORTS = {
    "diffusers": ("diffusers", "UNet2DConditionModel"),
    "transformers": ("transformers", "CLIPTextModel"),
}


def check_packages(context: Context) -> Iterator[HealthFinding]:
    """Judge what is installed."""
    yield HealthFinding("ok", f"Python {platform.python_version()}, {platform.platform()}", about="python")
    for name, least in REQUIRED.items():
        version = installed(name)
        if version is None:
            yield HealthFinding("wrong", f"{name} is not installed", _INSTALL, name)
        elif numbers(version) < numbers(least):
            yield HealthFinding(
                "wrong", f"{name} {version} is older than {least}", f"pip install '{name}>={least}'", name
            )
        else:
            yield HealthFinding("ok", f"{name} {version}", about=name)
    for name, use in OPTIONAL.items():
        version = installed(name)
        verdict, remedy = ("ok", "") if version else ("note", f"pip install {name}, if you need it")
        yield HealthFinding(verdict, f"{name} {version or 'is not installed'} (for {use})", remedy, name)  # type: ignore[arg-type]
    for name, why in HARMFUL.items():
        if version := installed(name):
            yield HealthFinding(
                "note", f"{name} {version} is installed: {why}", f"pip uninstall {name}, unless it is used", name
            )


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def imports(context: Context) -> Iterator[HealthFinding]:
    """Import what training imports; packages that do not fit together break here."""
    with contextlib.suppress(ConfigFault):  # the check of the devices says it
        hide_unusable_npu(context.kind)
    for name, (module, attribute) in _IMPORTS.items():
        try:
            getattr(import_module(module), attribute)
        except Exception as error:  # whatever a package raises that was built for another
            text = next(iter(str(error).splitlines()), type(error).__name__)
            harmful = [package for package in HARMFUL if installed(package)]
            remedy = f"pip uninstall {' '.join(harmful)}" if harmful else _INSTALL
            yield HealthFinding("wrong", f"{name} cannot be imported: {text}", remedy, name)
        else:
            yield HealthFinding("ok", f"{name} can be imported", about=name)


# --- Small facts that training hangs on: the draws, the compiler, and how fast the device multiplies


def noise(context: Context) -> Iterator[HealthFinding]:
    """Draws are the same on every machine where the table of quantiles is."""
    from difftrain.diffusion.draws import STREAM_VERSION, key_of, normal

    draw = normal(0, key_of("doctor"), 0, "noise", (4,))
    yield HealthFinding(
        "ok", f"noise: stream {STREAM_VERSION}, its quantile table is the same as on every machine ({draw[0]:.6f} ...)"
    )


def compiler(context: Context) -> Iterator[HealthFinding]:
    """Say whether --torch_compile works here."""
    why = context.device.why_compile_is_off("inductor") or context.device.why_not_compiled("inductor")
    compiler_path = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if why:
        yield HealthFinding("note", f"--torch_compile: {why}", "nothing: training works without it")
    elif not compiler_path:
        remedy = "install g++, or train without it"
        yield HealthFinding("note", "--torch_compile needs a C++ compiler, and none is on PATH", remedy)
    else:
        yield HealthFinding("ok", "--torch_compile: a C++ compiler is available")


def speed(context: Context) -> Iterator[HealthFinding]:
    """Measure the matmul rate, which MFU in the reports is measured against."""
    from difftrain.report.peaks import measure_matmul

    device = context.device
    for name in ("no",) if device.module is None else ("no", "bf16"):
        rate = measure_matmul(device.torch_device, name, device.synchronise, budget_s=1.0)
        word = "fp32" if name == "no" else name
        yield HealthFinding("ok", f"matmul in {word}: {rate / 1e12:.3f} TFLOP/s", about=word)
