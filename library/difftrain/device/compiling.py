"""Regional compile: block by block, in place, so that names stay and a block's code is shared by its like."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config.schema.sections import TrainingSection
    from difftrain.device.torch_device import Device


# One version of the code per kind of block, and two or more with buckets: more than dynamo's default of 8 for a class.
_VERSIONS = 256
_PACKAGES = {"tvm": "tvm", "openxla": "torch_xla"}


def compile_faults(section: TrainingSection, device: Device) -> list[str]:
    """Say why a backend cannot be used here; nothing is compiled."""
    if not section.compile:
        return []
    backend = section.compile_backend
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        return [f"there is no compile backend {backend!r}; known: {', '.join(known)}"]
    package = _PACKAGES.get(backend)
    if package is not None and importlib.util.find_spec(package) is None:
        return [f"the compile backend {backend} needs the package {package}, which is not installed"]
    why = device.why_not_compiled(backend)
    return [f"the compile backend {backend} cannot be used: {why}; aot_eager runs everywhere"] if why else []


def compile_blocks(
    blocks: Sequence[nn.Module], section: TrainingSection, device: Device, *, buckets: bool, spares: bool = False
) -> str:
    """Compile blocks, each when it is first used; return what to say of it at the start.

    buckets: inputs change their shape. The second shape compiles every kind once more, for sizes that change, and some
    a third time; from then on all shapes are served. spares: some blocks see fewer tokens than others of their kind,
    and are compiled for both numbers.
    """
    off = device.why_compile_is_off(section.compile_backend)
    if off:
        return f"compile: off on {device.kind}: {off}"
    from torch._dynamo import config as dynamo

    device.sweep_compiled(section.compile_backend)
    dynamo.recompile_limit = max(dynamo.recompile_limit, _VERSIONS)
    for block in blocks:
        block.compile(backend=section.compile_backend, dynamic=None if buckets else False)
    # blocks of a class whose parameters have the same shapes share their code
    kinds = len({(type(block), *(tuple(param.shape) for param in block.parameters())) for block in blocks})
    graphs = f"{kinds} graph{'s' if kinds > 1 else ''}"
    if spares:
        graphs = f"up to {2 * kinds} graphs (some blocks see fewer tokens)"
    often = f"{graphs} at the first step and about as many for every new shape" if buckets else graphs
    return (
        f"compile: {len(blocks)} blocks with {section.compile_backend}, {often}; "
        f"{device.compile_cost(section.compile_backend)}"
    )
