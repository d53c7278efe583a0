"""Optional packages of Ascend's: whether they are there, without importing them.

Both exist under names that other packages share, so each is known by a file that only Ascend's build has.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from importlib import metadata
from pathlib import Path

_APEX_MARK = "optimizers/npu_fused_adamw.py"  # NVIDIA's apex has no such file
_TORCHVISION_MARK = "io/_image.py"  # decoding from memory; older builds read files only


def found_apex() -> bool:
    """Tell whether Ascend's build of apex is installed, which brings NpuFusedAdamW."""
    return _has("apex", _APEX_MARK)


def found_torchvision_npu() -> bool:
    """Tell whether torchvision_npu is installed beside torchvision, in a version that decodes JPEG from memory."""
    return _has("torchvision_npu", _TORCHVISION_MARK) and _spec("torchvision") is not None


def version(distribution: str) -> str | None:
    """Return the version that is installed, None where none is."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _has(package: str, mark: str) -> bool:
    spec = _spec(package)
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any((Path(place) / mark).is_file() for place in places)


def _spec(package: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return None
