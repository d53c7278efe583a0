"""Faults of the packages around us that this code mends: one row each, and the one place that decides.

A mend is applied where the installed version is known to have its fault. In any other version the fault is looked for,
and the mend is left out where it is gone. Tests run every mend switched off and expect the failure, so that a row that
is no longer needed is noticed.
"""

from __future__ import annotations

import contextlib
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


class Patch(NamedTuple):
    """A change of an upstream package: whether its fault is there, and a function that puts it right until undone."""

    faulty: Callable[[], bool]
    put: Callable[[], Undo]


@dataclass(frozen=True)
class Mend:
    """One fault. versions: first that has it, first that is not known to (tested up to there).

    patch: "module:attribute" of a Patch, or empty where our own code goes another way and asks `on(name)`.
    """

    name: str
    package: str
    versions: tuple[str, str]
    issue: str
    fault: str
    patch: str = ""


TABLE: tuple[Mend, ...] = (
    Mend(
        "geglu",
        "diffusers",
        ("0.42.0", "0.43.0"),
        "none yet",
        "GEGLU takes npu_geglu wherever torch_npu is importable: CPU modules crash, and its GELU is the tanh form",
        "difftrain.device.gates:GEGLU",
    ),
    Mend(
        "rms_norm",
        "diffusers",
        ("0.42.0", "0.43.0"),
        "none yet",
        "RMSNorm takes npu_rms_norm wherever torch_npu is importable: CPU modules crash, and so do mixed dtypes",
        "difftrain.device.gates:RMS_NORM",
    ),
    Mend(
        "rotary",
        "diffusers",
        ("0.42.0", "0.43.0"),
        "none: for speed",
        "apply_rotary_emb takes nine kernels where npu_rotary_mul is one",
        "difftrain.device.gates:ROTARY",
    ),
    Mend(
        "native_npu",
        "diffusers",
        ("0.36.0", "0.43.0"),
        "diffusers issue 14397",
        "the dispatcher's NPU backend turns float masks round, drops is_causal, makes the host wait at every mask, and has "
        "no backward for context parallelism",
        "difftrain.device.attention_dispatch:NATIVE_NPU",
    ),
    Mend(
        "fused_adamw",
        "torch_npu",
        ("2.13.0", "2.14.0"),
        "none yet",
        "_fused_adamw_ ignores found_inf and grad_scale: gradients that are not finite reach the weights",
        "difftrain.device.adamw:FUSED_ADAMW",
    ),
    Mend(
        "npu_fused_adamw",
        "torch_npu",
        ("2.1.0", "2.14.0"),
        "none yet",
        "NpuFusedAdamW trains on the first step's gradients where gradients are freed between steps",
    ),
    Mend(
        "ddp_strides",
        "torch_npu",
        ("2.1.0", "2.14.0"),
        "Ascend/pytorch issue 17",
        "gradients laid out unlike their parameters are copied into DDP's buckets, and training converges slowly",
    ),
)

_applied: dict[str, Undo] = {}
_off: set[str] = set()


def rows(package: str) -> list[Mend]:
    """Return the mends of one package, in the order in which they are applied."""
    return [each for each in TABLE if each.package == package]


def apply(package: str) -> None:
    """Patch a package that is about to be used; what is patched, or not needed, is left as it is."""
    done = [each for each in rows(package) if each.patch and each.name not in _applied and _wanted(each)]
    for each in done:
        _applied[each.name] = _patch(each).put()
    if done:
        log.debug("mended in %s %s: %s", package, metadata.version(package), ", ".join(each.name for each in done))


def on(name: str) -> bool:
    """Tell whether a mend that is written into our own code is switched on, and its package loaded.

    A torch_npu that a run on another device leaves alone does no harm. Nothing looks for such a fault, so a later version than those tested is taken to have it too.
    """
    row = next(each for each in TABLE if each.name == name)
    loaded = sys.modules.get(row.package) is not None
    return loaded and name not in _off and versions.numbers(row.versions[0]) <= _installed(row.package)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch mends off for a while; for tests."""
    unknown = set(names) - {each.name for each in TABLE}
    assert not unknown, f"no such mends: {sorted(unknown)}"
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
        for each in TABLE:
            if each.name in again:
                _applied[each.name] = _patch(each).put()


def faulty(row: Mend) -> bool:
    """Look for a fault in the package as it came. Call where its patch is off."""
    return _patch(row).faulty()


def _wanted(row: Mend) -> bool:
    return row.name not in _off and (_known(row) or faulty(row))


def _known(row: Mend) -> bool:
    """Tell whether the installed version is known to have the fault."""
    first, beyond = row.versions
    return versions.numbers(first) <= _installed(row.package) < versions.numbers(beyond)


def _installed(package: str) -> tuple[int, ...]:
    """Return a package's version as numbers; none of them where it is missing."""
    try:
        return versions.numbers(metadata.version(package))
    except metadata.PackageNotFoundError:
        return ()


def _patch(row: Mend) -> Patch:
    module, _, attribute = row.patch.partition(":")
    return getattr(importlib.import_module(module), attribute)
