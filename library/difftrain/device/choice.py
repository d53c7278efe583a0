"""Which device this process trains on, and why."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.device import ascend, versions

if TYPE_CHECKING:
    from difftrain.device.torch_device import Device

KINDS = ("npu", "cuda", "cpu")  # in the order that "auto" prefers them
# which cards a process may see, and what gives it one of them
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
ONE_CARD = {"npu": "ASCEND_DEVICE_ID", "cuda": "CUDA_VISIBLE_DEVICES"}
_CUDA_NODES = "nvidia[0-9]*"
_WSL_NODE = Path("/dev/dxg")  # CUDA under Windows' Linux has no /dev/nvidia*


@dataclass(frozen=True)
class ProbedDevice:
    """Say how many devices of a kind can be used; where none, why not, and what would help."""

    kind: str
    count: int
    why_not: str = ""
    remedy: str = ""


def nodes(kind: str) -> int:
    """Count the device files of a kind without loading any driver library."""
    return len(ascend.nodes() if kind == "npu" else list(Path("/dev").glob(_CUDA_NODES)))


def hold_autoload() -> None:
    """Keep a bare `import torch` from loading torch_npu by itself; call before torch is imported.

    A torch_npu without CANN makes `import torch` fail, even where training is on the CPU. `choose` imports it where
    an NPU is to be used. Whatever is set already: torch_npu leaves a 1, torch's default, to the children of a process.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def calm_threads() -> None:
    """Let CPU threads spin for microseconds when they wait for one another; call before torch is imported.

    libgomp's own default is to spin for milliseconds, which keeps the thread that is waited for off its core as soon as
    there are more threads than cores: the demo beside one decoding process trained at 5 images a second on two cores,
    and at 165 with this. Whoever has set OMP_WAIT_POLICY or GOMP_SPINCOUNT keeps that.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def worth_asking(kind: str) -> bool:
    """Tell cheaply whether torch may know devices of this kind."""
    if kind == "npu":
        return importlib.util.find_spec("torch_npu") is not None
    return nodes(kind) > 0 or _WSL_NODE.exists()


def find(kind: str) -> ProbedDevice:
    """Ask torch for the devices of one kind; what the *_VISIBLE_DEVICES variables hide does not count."""
    if kind == "npu":
        return _find_npu()
    import torch

    if kind == "cpu":
        return ProbedDevice("cpu", 1)
    if torch.cuda.is_available():
        return ProbedDevice("cuda", torch.cuda.device_count())
    if torch.version.cuda is None and torch.version.hip is None:
        return ProbedDevice(
            "cuda", 0, f"this torch ({torch.__version__}) is built without CUDA", "install a CUDA build of torch"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return ProbedDevice("cuda", 0, f"torch sees none with CUDA_VISIBLE_DEVICES={hidden!r}", "unset it")
    return ProbedDevice(
        "cuda", 0, "torch sees no CUDA device", "check that nvidia-smi works, and which CUDA its driver supports"
    )


def _find_npu() -> ProbedDevice:
    if _hidden is not None:
        return _hidden
    if importlib.util.find_spec("torch_npu") is None:
        present = nodes("npu")
        beside = f", though {present} NPU device files are there" if present else ""
        return ProbedDevice(
            "npu", 0, f"torch_npu is not installed{beside}", "pip install torch_npu of torch's own version"
        )
    hold_autoload()
    import torch

    installed = ascend.version("torch_npu")
    if installed is not None and not versions.same_torch(installed, torch.__version__):
        # imported all the same, it would fail on a symbol, or crash
        judged = versions.judge_torch(installed, torch.__version__)
        return ProbedDevice("npu", 0, judged.observed, judged.remedy)
    try:
        npu = load_npu()
        count = npu.device_count() if npu.is_available() else 0
    except Exception as error:  # whatever its libraries raise: the wheel without CANN, an older CANN, a broken driver
        return ProbedDevice("npu", 0, *ascend.why_not_loaded(error, installed, torch.__version__))
    return ProbedDevice("npu", count) if count else ProbedDevice("npu", 0, *ascend.why_none_seen())


_hidden: ProbedDevice | None = None  # what was found of NPUs before torch_npu was hidden


def hide_unusable_npu(kind: str) -> None:
    """Let diffusers and transformers believe that torch_npu is not installed, where this process cannot or shall not use it.

    kind: as asked for. Both import torch_npu wherever its package is, and so fail without CANN. Call before either is
    imported. Raises ConfigFault where NPUs are asked for and cannot be used.
    """
    global _hidden
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is None:  # too late, or nothing to hide
        return
    probed = ProbedDevice("npu", 0, f"{kind} was requested") if kind in ("cuda", "cpu") else _find_npu()
    if probed.count:
        return
    if kind == "npu":
        raise ConfigFault([_absent(probed)])
    _hidden = probed
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]:  # what a failed import left
        del sys.modules[name]
    sys.modules["torch_npu"] = None  # type: ignore[assignment]  # no spec is found, and an import is refused


def load_npu() -> Any:
    """Import torch_npu and return torch.npu, set up to use built kernels instead of compiling each shape."""
    hold_autoload()
    import torch
    import torch_npu

    if hasattr(torch_npu.npu, "set_compile_mode") and torch_npu.npu.is_available():
        torch_npu.npu.set_compile_mode(jit_compile=False)
        # weights stay in plain row-major memory: CANN's own layouts cost a conversion at every flattened reduction,
        # foreach update and checkpoint, and gradients would have other strides than DDP's buckets
        torch_npu.npu.config.allow_internal_format = False
    return torch.get_device_module("npu")


def probe() -> str:
    """Return kind and count found, "npu 8"; imports torch only where an accelerator may be there."""
    for kind in KINDS[:-1]:
        if worth_asking(kind):
            probed = find(kind)
            if probed.count:
                return f"{kind} {probed.count}"
    return "cpu 1"


def choose(kind: str = "auto", local_rank: int = 0, local_size: int = 1) -> Device:
    """Take this process's device: the one asked for, or the first kind of npu, cuda, cpu that is there.

    Raises ConfigFault where the kind asked for is missing, or has fewer devices than processes.
    """
    if kind not in ("auto", *KINDS):
        raise ConfigFault([Fault(_option(), f"got {kind!r}", f"one of auto, {', '.join(KINDS)}")])
    if kind != "auto":
        probed = find(kind)
        if not probed.count:
            raise ConfigFault([_absent(probed)])
        return _take(probed, local_rank, local_size, "as asked for")
    missed = []
    for candidate in KINDS:
        if candidate != "cpu" and not worth_asking(candidate):
            if candidate == "npu" and (nodes("npu") or _hidden):
                missed.append(_missed(_find_npu()))
            continue
        probed = find(candidate)
        if probed.count:
            return _take(probed, local_rank, local_size, "; ".join(missed) or _nothing_better(candidate))
        missed.append(_missed(probed))
    raise AssertionError("the CPU is always available")


def _absent(probed: ProbedDevice) -> Fault:
    remedy = f"or leave {_option()}=auto"
    if probed.remedy:
        remedy = f"{probed.remedy}; {remedy}"
    return Fault(_option(), f"{probed.kind} requested, but {probed.why_not}", remedy)


def _option() -> str:
    """Return what messages call the choice; launchers probe a machine on which configuration's packages may be missing."""
    from difftrain.config.spellings.spelling import option

    return option("training.device")


def _missed(probed: ProbedDevice) -> str:
    return f"no {probed.kind}: {probed.why_not}" + (f" ({probed.remedy})" if probed.remedy else "")


def _nothing_better(kind: str) -> str:
    return "no accelerator found" if kind == "cpu" else "the first kind found"


def _take(probed: ProbedDevice, local_rank: int, local_size: int, reason: str) -> Device:
    from difftrain.device.torch_device import Device

    index = local_rank
    if probed.kind == "npu" and local_size == 1 and local_rank == 0:
        index = ascend_index()
    if probed.kind != "cpu" and max(index, local_size - 1) >= probed.count:
        raise ConfigFault(
            [
                Fault(
                    "--nproc_per_node",
                    f"{max(index + 1, local_size)} {probed.kind} devices requested on this machine, {probed.count} found",
                    f"--nproc_per_node={probed.count}, or make more visible",
                )
            ]
        )
    return Device(probed.kind, index if probed.kind != "cpu" else 0, probed.count, reason)


def ascend_index() -> int:
    """Return the index that ASCEND_DEVICE_ID names: a physical id, seen through ASCEND_RT_VISIBLE_DEVICES."""
    text = os.environ.get("ASCEND_DEVICE_ID", "").strip()
    if not text:
        return 0
    if not text.isdecimal():
        raise ConfigFault([Fault("environment ASCEND_DEVICE_ID", f"got {text!r}", "the number of one device")])
    visible = [part.strip() for part in os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if not visible:
        return int(text)
    if text not in visible:
        raise ConfigFault(
            [
                Fault(
                    "environment ASCEND_DEVICE_ID",
                    f"{text} is not among ASCEND_RT_VISIBLE_DEVICES={','.join(visible)}",
                    "set one of them, not both",
                )
            ]
        )
    return visible.index(text)
