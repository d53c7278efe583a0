"""What is installed for NPUs: torch_npu, CANN, driver and firmware against the tables, rights, optional packages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from difftrain.device import ascend, ascend_packages, host, versions
from difftrain.device.health.finding import Context, Finding, of_judgement


def check(context: Context) -> Iterator[Finding]:
    """Look at the installation; nothing is found where nothing of Ascend is here and no NPU is asked for."""
    wheel = importlib.util.find_spec("torch_npu") is not None
    there = ascend.nodes()
    if not wheel and not there and context.kind != "npu":
        return
    yield from _wheel(wheel, len(there), context.kind)
    if wheel:
        yield from map(_mild, _cann()) if unused(context.kind) else _cann()
    yield from _driver(bool(there))
    yield from _rights()
    yield from _optional()


def unused(kind: str) -> bool:
    """Tell whether NPUs are not to be used: training then leaves torch_npu alone, whatever is wrong with it."""
    return kind in ("cuda", "cpu")


def _mild(found: Finding) -> Finding:
    return found._replace(verdict="note") if found.verdict == "wrong" else found


def _wheel(wheel: bool, there: int, kind: str) -> Iterator[Finding]:
    torch = ascend_packages.version("torch")
    if not wheel:
        remedy = f"pip install torch_npu=={versions.torch_npu_for(torch)}" if torch else "install torch and torch_npu"
        beside = f"{there} NPU device files are here, and " if there else ""
        yield Finding("wrong" if kind == "npu" else "note", f"{beside}torch_npu is not installed", remedy, "torch_npu")
        return
    installed = ascend_packages.version("torch_npu")
    if installed is None:
        yield Finding(
            "note", "torch_npu is here without metadata", "install it with pip, so its version is known", "torch_npu"
        )
    elif torch is not None:
        judged = of_judgement(versions.judge_torch(installed, torch), "torch_npu")
        yield _mild(judged) if unused(kind) else judged


def _cann() -> Iterator[Finding]:
    installed, cann = ascend_packages.version("torch_npu"), host.cann_version()
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if cann is None and not home:
        yield Finding("wrong", "torch_npu is installed, and CANN is not in this shell", ascend.source_cann(), "cann")
    elif installed is not None:
        yield of_judgement(versions.judge_cann(installed, cann), "cann")


def _driver(there: bool) -> Iterator[Finding]:
    judged = versions.judge_driver(host.cann_version(), host.npu_driver())
    yield of_judgement(judged, "driver")
    firmware = host.npu_firmware()
    if firmware is not None:
        yield Finding("ok", f"firmware {firmware}", about="firmware")
    elif there:
        yield Finding(
            "note",
            "the version of the firmware could not be read",
            "npu-smi info -t board -i 0 shows it; it belongs to the driver's release",
            "firmware",
        )


def _rights() -> Iterator[Finding]:
    if closed := ascend.without_right():
        yield Finding("wrong", f"this user has no right to use {', '.join(closed)}", ascend.right_remedy(), "rights")
    elif there := ascend.nodes():
        lacking = [name for name in ascend.COMPANIONS if not (ascend.DEV / name).exists()]
        if lacking:
            flags = " ".join(f"--device=/dev/{name}" for name in lacking)
            yield Finding("wrong", f"/dev lacks {', '.join(lacking)}", f"start the container with {flags}", "rights")
        else:
            yield Finding("ok", f"{len(there)} NPU device files, open to this user", about="rights")


def _optional() -> Iterator[Finding]:
    if ascend_packages.found_apex():
        yield Finding(
            "ok", "Ascend's apex is installed; its optimizers step under apex.amp alone: not used", about="apex"
        )
    else:
        yield Finding("ok", "Ascend's apex is not installed, and nothing here needs it", about="apex")
    if ascend_packages.found_torchvision_npu():
        yield Finding(
            "ok",
            "torchvision_npu is installed; it decodes JPEG with --image_decoder=device, else the host does",
            about="torchvision_npu",
        )
    else:
        yield Finding("ok", "torchvision_npu is not installed, and nothing here needs it", about="torchvision_npu")
