"""Packages: their versions, and whether those that training needs can be imported."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from importlib import import_module, metadata

from difftrain.contracts.errors import ConfigFault
from difftrain.device.choice import hide_unusable_npu
from difftrain.device.health.finding import Context, Finding
from difftrain.device.versions import numbers

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
    "fsspec": "2023.12",
    "tensorboard": "2.15",
    "tqdm": "4.66",
}
OPTIONAL = {
    "wandb": "--log_with=wandb",
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


def check(context: Context) -> Iterator[Finding]:
    """Judge what is installed."""
    yield Finding("ok", f"Python {platform.python_version()}, {platform.platform()}", about="python")
    for name, least in REQUIRED.items():
        version = installed(name)
        if version is None:
            yield Finding("wrong", f"{name} is not installed", _INSTALL, name)
        elif numbers(version) < numbers(least):
            yield Finding("wrong", f"{name} {version} is older than {least}", f"pip install '{name}>={least}'", name)
        else:
            yield Finding("ok", f"{name} {version}", about=name)
    for name, use in OPTIONAL.items():
        version = installed(name)
        verdict, remedy = ("ok", "") if version else ("note", f"pip install {name}, where that is wanted")
        yield Finding(verdict, f"{name} {version or 'is not installed'} (for {use})", remedy, name)  # type: ignore[arg-type]
    for name, why in HARMFUL.items():
        if version := installed(name):
            yield Finding(
                "note", f"{name} {version} is installed: {why}", f"pip uninstall {name}, unless it is of use", name
            )


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def imports(context: Context) -> Iterator[Finding]:
    """Import what training imports; packages that do not fit together break here."""
    with contextlib.suppress(ConfigFault):  # the check of the devices says it
        hide_unusable_npu(context.kind)
    for name, (module, attribute) in _IMPORTS.items():
        try:
            getattr(import_module(module), attribute)
        except Exception as error:  # whatever a package raises that was built for another
            text = next(iter(str(error).splitlines()), type(error).__name__)
            there = [each for each in HARMFUL if installed(each)]
            remedy = f"pip uninstall {' '.join(there)}" if there else _INSTALL
            yield Finding("wrong", f"{name} cannot be imported: {text}", remedy, name)
        else:
            yield Finding("ok", f"{name} can be imported", about=name)
