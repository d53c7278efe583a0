"""Faults of the packages around us that this code patches: one row each, and the one place that decides.

A patch is applied where the installed version is known to have its fault. In any other version the fault is looked for,
and the patch is left out where it is gone. Tests run with every patch switched off and expect the failure, so that a row that
is no longer needed is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from difftrain.device import versions

log = logging.getLogger("difftrain")
Undo = Callable[[], None]


class PatchHook(NamedTuple):
    """A change of an upstream package: whether its fault is there, and a function that puts it right until undone."""

    faulty: Callable[[], bool]
    put: Callable[[], Undo]


@dataclass(frozen=True)
class Patch:
    """One fault. versions: first that has it, first that is not known to (tested up to there).

    patch: "module:attribute" of a PatchHook, or empty where our own code goes another way and asks `on(name)`.
    module: that has the fault, where it is patched only once something has imported it.
    """

    name: str
    package: str
    versions: tuple[str, str]
    issue: str
    fault: str
    patch: str = ""
    module: str = ""


PATCHES: tuple[Patch, ...] = (
    Patch(
        "geglu",
        "diffusers",
        ("0.42.0", "0.43.0"),
        "none yet",
        "GEGLU uses npu_geglu wherever torch_npu is importable: CPU modules crash, and its GELU is the tanh form",
        "difftrain.device.fused_layers:GEGLU",
    ),
    Patch(
        "rms_norm",
        "diffusers",
        ("0.42.0", "0.43.0"),
        "none yet",
        "RMSNorm uses npu_rms_norm wherever torch_npu is importable: CPU modules crash, and so do mixed dtypes",
        "difftrain.device.fused_layers:RMS_NORM",
    ),
    Patch(
        "rotary",
        "diffusers",
        ("0.42.0", "0.43.0"),
        "none: for speed",
        "apply_rotary_emb needs nine kernels where npu_rotary_mul is one",
        "difftrain.device.fused_layers:ROTARY",
    ),
    Patch(
        "complex_rotary_of_text_and_image",
        "diffusers",
        ("0.35.0", "0.43.0"),
        "diffusers issue 13689",
        "apply_rotary_emb_qwen multiplies by complex tables, which an NPU has few kernels for, and takes no real ones of that form",
        "difftrain.device.rotary:TEXT_AND_IMAGE",
        "diffusers.models.transformers.transformer_qwenimage",
    ),
    Patch(
        "complex_rotary_of_one_stream",
        "diffusers",
        ("0.36.0", "0.43.0"),
        "diffusers issue 13689",
        "ZSingleStreamAttnProcessor multiplies by complex tables inside, and takes no others",
        "difftrain.device.rotary:ONE_STREAM",
        "diffusers.models.transformers.transformer_z_image",
    ),
    Patch(
        "complex_rotary_of_grouped_heads",
        "diffusers",
        ("0.33.0", "0.43.0"),
        "none yet: models/transformers/transformer_lumina2.py, Lumina2RotaryPosEmbed",
        "its rotary tables are complex numbers of twice fp64, which not every device has, and rotate in fp64",
        "difftrain.device.rotary:GROUPED",
        "diffusers.models.transformers.transformer_lumina2",
    ),
    Patch(
        "routed_experts",
        "diffusers",
        ("0.34.0", "0.43.0"),
        "none yet: models/transformers/transformer_hidream_image.py, MOEFeedForwardSwiGLU",
        "its host waits for the number of tokens of each expert, an NPU sums them on the host, and in evaluation no "
        "gradient goes through them",
        "difftrain.device.experts:ROUTED",
        "diffusers.models.transformers.transformer_hidream_image",
    ),
    Patch(
        "causal_frames",
        "diffusers",
        ("0.36.0", "0.43.0"),
        "diffusers pull request 13133",
        "HunyuanVideo15AttnBlock's mask is of one clip alone, and of the square of all positions",
        "difftrain.device.frame_attention:CAUSAL_FRAMES",
        "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15",
    ),
    Patch(
        "native_npu",
        "diffusers",
        ("0.36.0", "0.43.0"),
        "diffusers issue 14397",
        "the dispatcher's NPU backend inverts float masks, drops is_causal, makes the host wait at every mask, and has "
        "no backward for context parallelism",
        "difftrain.device.attention_dispatch:NATIVE_NPU",
    ),
    Patch(
        "fused_adamw",
        "torch_npu",
        ("2.13.0", "2.14.0"),
        "none yet",
        "_fused_adamw_ ignores found_inf and grad_scale: gradients that are not finite reach the weights",
        "difftrain.device.fused_layers:FUSED_ADAMW",
    ),
    Patch(
        "npu_fused_adamw",
        "torch_npu",
        ("2.1.0", "2.14.0"),
        "none yet",
        "NpuFusedAdamW trains on the first step's gradients where gradients are freed between steps",
    ),
    Patch(
        "ddp_strides",
        "torch_npu",
        ("2.1.0", "2.14.0"),
        "Ascend/pytorch issue 17",
        "gradients laid out unlike their parameters are copied into DDP's buckets, and training converges slowly",
    ),
)

_applied: dict[str, Undo] = {}
_off: set[str] = set()


def rows(package: str) -> list[Patch]:
    """Return the patches of one package, in the order in which they are applied."""
    return [patch for patch in PATCHES if patch.package == package]


def apply(package: str) -> None:
    """Patch a package that is about to be used; what is patched, not needed or not imported yet is left as it is."""
    ready = [row for row in rows(package) if row.patch and (not row.module or row.module in sys.modules)]
    done = [row for row in ready if row.name not in _applied and _is_needed(row)]
    for patch in done:
        _applied[patch.name] = _hook(patch).put()
    if done:
        log.debug("patched in %s %s: %s", package, metadata.version(package), ", ".join(patch.name for patch in done))


def on(name: str) -> bool:
    """Tell whether a patch that is written into our own code is switched on, and its package loaded.

    A torch_npu that a run on another device leaves alone does no harm. Nothing looks for such a fault, so a later
    version than those tested is taken to have it too.
    """
    row = next(patch for patch in PATCHES if patch.name == name)
    loaded = sys.modules.get(row.package) is not None
    return loaded and name not in _off and versions.numbers(row.versions[0]) <= _installed(row.package)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch patches off for a while; for tests."""
    unknown = set(names) - {patch.name for patch in PATCHES}
    assert not unknown, f"no such patches: {sorted(unknown)}"
    before = set(_off)
    again = [name for name in names if name in _applied]
    for name in reversed(again):
        _applied.pop(name)()
    _off.update(names)
    try:
        yield
    finally:
        _off.clear()
        _off.update(before)
        for patch in PATCHES:
            if patch.name in again:
                _applied[patch.name] = _hook(patch).put()


def faulty(row: Patch) -> bool:
    """Look for a fault in the package as it came. Call where its patch is off."""
    return _hook(row).faulty()


def _is_needed(row: Patch) -> bool:
    return row.name not in _off and (_known(row) or faulty(row))


def _known(row: Patch) -> bool:
    """Tell whether the installed version is known to have the fault."""
    first, beyond = row.versions
    return versions.numbers(first) <= _installed(row.package) < versions.numbers(beyond)


@functools.cache  # each family that is built asks
def _installed(package: str) -> tuple[int, ...]:
    """Return a package's version as numbers; none of them where it is missing."""
    try:
        return versions.numbers(metadata.version(package))
    except metadata.PackageNotFoundError:
        return ()


def _hook(row: Patch) -> PatchHook:
    module, _, attribute = row.patch.partition(":")
    return getattr(importlib.import_module(module), attribute)
