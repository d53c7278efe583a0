"""Why torch_npu cannot be used here, and what would help: without CANN, for another torch, without a device or a right."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from difftrain.device import versions

ROOTS = (Path("/usr/local/Ascend"), Path.home() / "Ascend")
DEV = Path("/dev")
GROUP = "HwHiAiUser"  # the group that the driver's installer gives the device files to
# what every process needs beside the device itself
COMPANIONS = ("davinci_manager", "devmm_svm", "hisi_hdc")
_SCRIPTS = ("cann/set_env.sh", "ascend-toolkit/set_env.sh", "nnae/set_env.sh", "set_env.sh")
_MISSING = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")
_SYMBOL = re.compile(r"undefined symbol: (\w+)")
_OF_DRIVER = ("libascend_hal", "libdrvdsmi_host", "libdcmi", "libc_sec")


class Why(NamedTuple):
    """A cause, and its remedy."""

    cause: str
    remedy: str


def nodes() -> list[Path]:
    """Return the device files of NPUs, /dev/davinci0 and so on."""
    return sorted(path for path in DEV.glob("davinci*") if path.name[7:].isdecimal())


def set_env_script() -> Path | None:
    """Return CANN's set_env.sh where its installers put it, of the running CANN first."""
    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    places = [Path(home) / "set_env.sh", Path(home).parent / "set_env.sh"] if home else []
    places += [root / script for root in ROOTS for script in _SCRIPTS]
    return next((path for path in places if path.is_file()), None)


def source_cann() -> str:
    """Say how CANN comes into this shell, or that it must be installed."""
    script = set_env_script()
    if script is not None:
        return f"source {script} (test/env_npu.sh does), then start again"
    return "install CANN, and source its set_env.sh; where it is installed elsewhere, that folder's"


def why_not_loaded(error: BaseException, torch_npu: str | None, torch: str) -> Why:
    """Say why `import torch_npu` failed. torch_npu: the version of its package, None where it has none."""
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    if match := _MISSING.search(str(error)):
        library = match.group(1)
        if library.startswith(_OF_DRIVER):
            return Why(f"torch_npu cannot be loaded: {library}, of the Ascend driver, was not found", _driver_remedy())
        return Why(f"torch_npu cannot be loaded: {library}, of CANN, was not found", source_cann())

    # --- built for another torch or another CANN
    if match := _SYMBOL.search(str(error)):
        symbol = match.group(1)
        if symbol.startswith("_Z"):  # C++ names are torch's; what torch_npu takes of CANN is plain C
            remedy = f"pip install torch_npu=={versions.torch_npu_for(torch)}, and no other module of that name on PYTHONPATH"
            return Why(
                f"torch_npu {torch_npu or ''} was built for another torch than {torch} ({symbol} is missing)", remedy
            )
        row = versions.pair_of(torch_npu or torch)
        return Why(
            f"the CANN in use lacks {symbol}, which torch_npu {torch_npu or ''} needs",
            f"install CANN {row.cann}, and source its set_env.sh" if row else "install the CANN of this torch_npu",
        )

    if "wo accelerators" in text:
        return Why(
            f"torch_npu does not load with a torch built for another accelerator: {text}",
            "install the CPU build of torch",
        )
    return Why(f"torch_npu cannot be loaded: {text}", "difftrain doctor looks at versions, CANN and driver one by one")


def why_none_seen() -> Why:
    """Say why torch_npu, which could be loaded, sees no device."""
    hidden = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    npus = nodes()
    if hidden is not None:
        count = f"{len(npus)} on this machine" if npus else "none on this machine"
        return Why(
            f"torch_npu sees no NPU with ASCEND_RT_VISIBLE_DEVICES={hidden!r} ({count})",
            "unset it, or name devices that npu-smi info shows",
        )
    if not npus:
        flags = " ".join(f"--device=/dev/{name}" for name in ("davinci0", *COMPANIONS))
        return Why(
            "torch_npu sees no NPU: there is no /dev/davinci* here",
            f"see whether npu-smi info works, otherwise install driver and firmware; in a container start it with {flags}",
        )
    if closed := without_right():
        return Why(f"torch_npu sees no NPU: no permission for {', '.join(closed)}", right_remedy())
    return Why(
        f"torch_npu sees no NPU, though {len(npus)} device files are there",
        "see npu-smi info for the health of the devices, and whether another container uses them",
    )


def without_right() -> list[str]:
    """Return the device files that are there and closed to this user."""
    files = [*nodes(), *(DEV / name for name in COMPANIONS)]
    return [str(path) for path in files if path.exists() and not os.access(path, os.R_OK | os.W_OK)]


def right_remedy() -> str:
    """Say how a user comes to the right to use NPUs."""
    return f"sudo usermod -aG {GROUP} $USER, and log in again; or install the driver with --install-for-all"


def _driver_remedy() -> str:
    folder = "/usr/local/Ascend/driver/lib64"
    return f"install the driver; in a container mount {folder}, and keep it on LD_LIBRARY_PATH (set_env.sh does)"


# --- Optional packages of Ascend's: whether they are there, without importing them
# Both exist under names that other packages share, so each is known by a file that only Ascend's build has.


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
    return any((Path(path) / mark).is_file() for path in places)


def _spec(package: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return None
