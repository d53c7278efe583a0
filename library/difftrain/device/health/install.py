"""What is installed for NPUs: torch_npu, CANN, driver and firmware against the tables, rights, optional packages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from difftrain.contracts import ConfigFault
from difftrain.device import ascend, host, versions
from difftrain.device.choice import KINDS, find, nodes
from difftrain.device.health import Context, HealthFinding, of_judgement


def check(context: Context) -> Iterator[HealthFinding]:
    """Look at the installation; nothing is found where nothing of Ascend is here and no NPU is asked for."""
    wheel = importlib.util.find_spec("torch_npu") is not None
    nodes = ascend.nodes()
    if not wheel and not nodes and context.kind != "npu":
        return
    yield from _wheel(wheel, len(nodes), context.kind)
    if wheel:
        yield from map(_mild, _cann()) if unused(context.kind) else _cann()
    yield from _driver(bool(nodes))
    yield from _rights()
    yield from _optional()


def unused(kind: str) -> bool:
    """Tell whether NPUs are not to be used: training then leaves torch_npu alone, whatever is wrong with it."""
    return kind in ("cuda", "cpu")


def _mild(finding: HealthFinding) -> HealthFinding:
    return finding._replace(verdict="note") if finding.verdict == "wrong" else finding


def _wheel(wheel: bool, nodes: int, kind: str) -> Iterator[HealthFinding]:
    torch = ascend.version("torch")
    if not wheel:
        remedy = f"pip install torch_npu=={versions.torch_npu_for(torch)}" if torch else "install torch and torch_npu"
        beside = f"{nodes} NPU device files are here, and " if nodes else ""
        yield HealthFinding(
            "wrong" if kind == "npu" else "note", f"{beside}torch_npu is not installed", remedy, "torch_npu"
        )
        return
    installed = ascend.version("torch_npu")
    if installed is None:
        yield HealthFinding(
            "note", "torch_npu is present without metadata", "install it with pip, so its version is known", "torch_npu"
        )
    elif torch is not None:
        judged = of_judgement(versions.judge_torch(installed, torch), "torch_npu")
        yield _mild(judged) if unused(kind) else judged


def _cann() -> Iterator[HealthFinding]:
    installed, cann = ascend.version("torch_npu"), host.cann_version()
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if cann is None and not home:
        yield HealthFinding(
            "wrong", "torch_npu is installed, and CANN is not set up in this shell", ascend.source_cann(), "cann"
        )
    elif installed is not None:
        yield of_judgement(versions.judge_cann(installed, cann), "cann")


def _driver(present: bool) -> Iterator[HealthFinding]:
    judged = versions.judge_driver(host.cann_version(), host.npu_driver())
    yield of_judgement(judged, "driver")
    firmware = host.npu_firmware()
    if firmware is not None:
        yield HealthFinding("ok", f"firmware {firmware}", about="firmware")
    elif present:
        yield HealthFinding(
            "note",
            "the version of the firmware could not be read",
            "npu-smi info -t board -i 0 shows it; it must match the driver's release",
            "firmware",
        )


def _rights() -> Iterator[HealthFinding]:
    if closed := ascend.without_right():
        yield HealthFinding(
            "wrong", f"this user has no permission for {', '.join(closed)}", ascend.right_remedy(), "rights"
        )
    elif nodes := ascend.nodes():
        lacking = [name for name in ascend.COMPANIONS if not (ascend.DEV / name).exists()]
        if lacking:
            flags = " ".join(f"--device=/dev/{name}" for name in lacking)
            yield HealthFinding(
                "wrong", f"/dev lacks {', '.join(lacking)}", f"start the container with {flags}", "rights"
            )
        else:
            yield HealthFinding("ok", f"{len(nodes)} NPU device files, open to this user", about="rights")


def _optional() -> Iterator[HealthFinding]:
    if ascend.found_apex():
        yield HealthFinding(
            "ok", "Ascend's apex is installed; its optimizers work only under apex.amp: not used", about="apex"
        )
    else:
        yield HealthFinding("ok", "Ascend's apex is not installed, and nothing here needs it", about="apex")
    if ascend.found_torchvision_npu():
        yield HealthFinding(
            "ok",
            "torchvision_npu is installed; it decodes JPEG with --image_decoder=device, otherwise the host decodes",
            about="torchvision_npu",
        )
    else:
        yield HealthFinding(
            "ok", "torchvision_npu is not installed, and nothing here needs it", about="torchvision_npu"
        )


# --- The devices: which kinds are there, the memory and the health of each, and that each computes


_SMI = "npu-smi"
_SMI_LIMIT_S = 20.0
_HEALTH = re.compile(
    r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(OK|Warning|Alarm|Critical|UNKNOWN)\s*\|", re.MULTILINE | re.IGNORECASE
)
LEAST_SHARE = 0.5  # of a device's memory that should be free


def check_devices(context: Context) -> Iterator[HealthFinding]:
    """Say which kinds are there, and which device training would take."""
    for kind in KINDS:
        probed = find(kind)
        if probed.count:
            yield HealthFinding("ok", f"{kind}: {probed.count} found", about=kind)
        else:
            requested = context.kind == kind
            half_there = nodes(kind) or (kind == "npu" and ascend.version("torch_npu"))
            remedy = probed.remedy if requested or half_there else ""  # else there is nothing to mend
            yield HealthFinding("wrong" if requested else "note", f"{kind}: {probed.why_not}", remedy, kind)
    try:
        device = context.device
    except ConfigFault as error:
        for fault in error.faults:
            yield HealthFinding("wrong", f"{fault.where}: {fault.what}", fault.remedy, "chosen")
        return
    about = {key: value for key, value in device.describe().items() if value and key not in ("host", "kind", "index")}
    text = ", ".join(f"{key} {value}" for key, value in about.items())
    yield HealthFinding("ok", f"training would take {device.torch_device}: {text}", about="chosen")


def check_memory(context: Context) -> Iterator[HealthFinding]:
    """Look at every device: memory, what the driver says of its health, and a sum that must come out exactly."""
    device = context.device
    if device.module is None:
        yield _memory_of_host()
        return
    health = npu_health() if device.kind == "npu" else {}
    for index in range(device.count):
        yield _memory_of(device.module, device.kind, index)
    for card, state in health.items():
        if state.upper() != "OK":
            yield HealthFinding(
                "wrong", f"npu-smi calls card {card} {state}", f"npu-smi info -t health -i {card}", f"card_{card}"
            )


def _memory_of(module: Any, kind: str, index: int) -> HealthFinding:
    import torch

    name, about = module.get_device_name(index), f"{kind}_{index}"
    free, total = module.mem_get_info(index)
    text = f"{kind}:{index}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    numbers = torch.arange(64 * 64, dtype=torch.float32).remainder(7).reshape(64, 64)
    copied = numbers.to(torch.device(kind, index))
    if not torch.equal((copied @ copied).cpu(), numbers @ numbers):  # small whole numbers: no rounding anywhere
        return HealthFinding(
            "wrong", f"{text}; a product of whole numbers is wrong", "do not train on this device", about
        )
    if free < LEAST_SHARE * total:
        tool = _SMI if kind == "npu" else "nvidia-smi"
        return HealthFinding("note", f"{text}: other processes use the rest", f"see {tool} for their processes", about)
    return HealthFinding("ok", text, about=about)


def _memory_of_host() -> HealthFinding:
    from difftrain.device import host

    available = host.available_bytes()
    if available is None:
        return HealthFinding("note", "the system does not report how much memory is free", about="memory")
    text = f"{available / 2**30:.1f} GiB of memory are available"
    if available < 2 << 30:
        return HealthFinding("note", text, "end other processes, or raise the container's limit", "memory")
    return HealthFinding("ok", text, about="memory")


def link_remedy(kind: str) -> str:
    """Say what to look at where devices of a kind do not sum with one another."""
    return {
        "npu": "see hccn_tool for the links, that all devices have the same driver, and whether other processes use them",
        "cuda": "see nvidia-smi topo -m, whether other processes use the devices, and what NCCL_DEBUG=INFO says",
        "cpu": "check whether a firewall or a proxy blocks the loopback interface; GLOO_SOCKET_IFNAME=lo may help",
    }[kind]


def npu_health() -> dict[str, str]:
    """Return what npu-smi says of each card's health, "OK" or worse; nothing where the tool is not there."""
    if shutil.which(_SMI) is None:
        return {}
    try:
        done = subprocess.run([_SMI, "info"], capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {card: state for card, _, state in _HEALTH.findall(done.stdout)}
