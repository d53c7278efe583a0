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
from difftrain.device.health import Context, Finding, of_judgement


def check(context: Context) -> Iterator[Finding]:
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


def _mild(finding: Finding) -> Finding:
    return finding._replace(verdict="note") if finding.verdict == "wrong" else finding


def _wheel(wheel: bool, nodes: int, kind: str) -> Iterator[Finding]:
    torch = ascend.version("torch")
    if not wheel:
        remedy = f"pip install torch_npu=={versions.torch_npu_for(torch)}" if torch else "install torch and torch_npu"
        beside = f"{nodes} NPU device files are here, and " if nodes else ""
        yield Finding("wrong" if kind == "npu" else "note", f"{beside}torch_npu is not installed", remedy, "torch_npu")
        return
    installed = ascend.version("torch_npu")
    if installed is None:
        yield Finding(
            "note", "torch_npu is here without metadata", "install it with pip, so its version is known", "torch_npu"
        )
    elif torch is not None:
        judged = of_judgement(versions.judge_torch(installed, torch), "torch_npu")
        yield _mild(judged) if unused(kind) else judged


def _cann() -> Iterator[Finding]:
    installed, cann = ascend.version("torch_npu"), host.cann_version()
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if cann is None and not home:
        yield Finding("wrong", "torch_npu is installed, and CANN is not in this shell", ascend.source_cann(), "cann")
    elif installed is not None:
        yield of_judgement(versions.judge_cann(installed, cann), "cann")


def _driver(present: bool) -> Iterator[Finding]:
    judged = versions.judge_driver(host.cann_version(), host.npu_driver())
    yield of_judgement(judged, "driver")
    firmware = host.npu_firmware()
    if firmware is not None:
        yield Finding("ok", f"firmware {firmware}", about="firmware")
    elif present:
        yield Finding(
            "note",
            "the version of the firmware could not be read",
            "npu-smi info -t board -i 0 shows it; it belongs to the driver's release",
            "firmware",
        )


def _rights() -> Iterator[Finding]:
    if closed := ascend.without_right():
        yield Finding("wrong", f"this user has no right to use {', '.join(closed)}", ascend.right_remedy(), "rights")
    elif nodes := ascend.nodes():
        lacking = [name for name in ascend.COMPANIONS if not (ascend.DEV / name).exists()]
        if lacking:
            flags = " ".join(f"--device=/dev/{name}" for name in lacking)
            yield Finding("wrong", f"/dev lacks {', '.join(lacking)}", f"start the container with {flags}", "rights")
        else:
            yield Finding("ok", f"{len(nodes)} NPU device files, open to this user", about="rights")


def _optional() -> Iterator[Finding]:
    if ascend.found_apex():
        yield Finding(
            "ok", "Ascend's apex is installed; its optimizers step under apex.amp alone: not used", about="apex"
        )
    else:
        yield Finding("ok", "Ascend's apex is not installed, and nothing here needs it", about="apex")
    if ascend.found_torchvision_npu():
        yield Finding(
            "ok",
            "torchvision_npu is installed; it decodes JPEG with --image_decoder=device, else the host does",
            about="torchvision_npu",
        )
    else:
        yield Finding("ok", "torchvision_npu is not installed, and nothing here needs it", about="torchvision_npu")


# --- The devices: which kinds are there, the memory and the health of each, and that each computes


_SMI = "npu-smi"
_SMI_LIMIT_S = 20.0
_HEALTH = re.compile(
    r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(OK|Warning|Alarm|Critical|UNKNOWN)\s*\|", re.MULTILINE | re.IGNORECASE
)
LEAST_SHARE = 0.5  # of a device's memory that should be free


def check_devices(context: Context) -> Iterator[Finding]:
    """Say which kinds are there, and which device training would take."""
    for kind in KINDS:
        probed = find(kind)
        if probed.count:
            yield Finding("ok", f"{kind}: {probed.count} found", about=kind)
        else:
            asked = context.kind == kind
            half_there = nodes(kind) or (kind == "npu" and ascend.version("torch_npu"))
            remedy = probed.remedy if asked or half_there else ""  # else there is nothing to mend
            yield Finding("wrong" if asked else "note", f"{kind}: {probed.why_not}", remedy, kind)
    try:
        device = context.device
    except ConfigFault as error:
        for fault in error.faults:
            yield Finding("wrong", f"{fault.where}: {fault.what}", fault.remedy, "chosen")
        return
    about = {key: value for key, value in device.describe().items() if value and key not in ("host", "kind", "index")}
    text = ", ".join(f"{key} {value}" for key, value in about.items())
    yield Finding("ok", f"training would take {device.torch_device}: {text}", about="chosen")


def check_memory(context: Context) -> Iterator[Finding]:
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
            yield Finding(
                "wrong", f"npu-smi calls card {card} {state}", f"npu-smi info -t health -i {card}", f"card_{card}"
            )


def _memory_of(module: Any, kind: str, index: int) -> Finding:
    import torch

    name, about = module.get_device_name(index), f"{kind}_{index}"
    free, total = module.mem_get_info(index)
    text = f"{kind}:{index}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    numbers = torch.arange(64 * 64, dtype=torch.float32).remainder(7).reshape(64, 64)
    copied = numbers.to(torch.device(kind, index))
    if not torch.equal((copied @ copied).cpu(), numbers @ numbers):  # small whole numbers: no rounding anywhere
        return Finding(
            "wrong", f"{text}; a product of whole numbers comes out wrong", "do not train on this card", about
        )
    if free < LEAST_SHARE * total:
        tool = _SMI if kind == "npu" else "nvidia-smi"
        return Finding("note", f"{text}: others use the rest", f"see {tool} for their processes", about)
    return Finding("ok", text, about=about)


def _memory_of_host() -> Finding:
    from difftrain.device import host

    available = host.available_bytes()
    if available is None:
        return Finding("note", "the system does not say how much memory is free", about="memory")
    text = f"{available / 2**30:.1f} GiB of memory can be taken"
    if available < 2 << 30:
        return Finding("note", text, "end other processes, or raise the container's limit", "memory")
    return Finding("ok", text, about="memory")


def link_remedy(kind: str) -> str:
    """Say what to look at where devices of a kind do not sum with one another."""
    return {
        "npu": "see hccn_tool for the links, that all cards have the same driver, and whether others hold them",
        "cuda": "see nvidia-smi topo -m, whether others hold the cards, and what NCCL_DEBUG=INFO says",
        "cpu": "see whether a firewall or a proxy closes the loopback; GLOO_SOCKET_IFNAME=lo may help",
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
