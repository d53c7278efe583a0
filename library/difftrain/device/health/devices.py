"""The devices: which kinds are there, the memory and the health of each, and that each computes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from difftrain.contracts import ConfigFault
from difftrain.device import ascend_packages
from difftrain.device.choice import KINDS, find, nodes
from difftrain.device.health.finding import Context, Finding

_SMI = "npu-smi"
_SMI_LIMIT_S = 20.0
_HEALTH = re.compile(
    r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(OK|Warning|Alarm|Critical|UNKNOWN)\s*\|", re.MULTILINE | re.IGNORECASE
)
LEAST_SHARE = 0.5  # of a device's memory that should be free


def check(context: Context) -> Iterator[Finding]:
    """Say which kinds are there, and which device training would take."""
    for kind in KINDS:
        found = find(kind)
        if found.count:
            yield Finding("ok", f"{kind}: {found.count} found", about=kind)
        else:
            asked = context.kind == kind
            half_there = nodes(kind) or (kind == "npu" and ascend_packages.version("torch_npu"))
            remedy = found.remedy if asked or half_there else ""  # else there is nothing to mend
            yield Finding("wrong" if asked else "note", f"{kind}: {found.why_not}", remedy, kind)
    try:
        device = context.device
    except ConfigFault as error:
        for fault in error.faults:
            yield Finding("wrong", f"{fault.where}: {fault.what}", fault.remedy, "chosen")
        return
    about = {key: value for key, value in device.describe().items() if value and key not in ("host", "kind", "index")}
    said = ", ".join(f"{key} {value}" for key, value in about.items())
    yield Finding("ok", f"training would take {device.torch_device}: {said}", about="chosen")


def each(context: Context) -> Iterator[Finding]:
    """Look at every device: memory, what the driver says of its health, and a sum that must come out exactly."""
    device = context.device
    if device.module is None:
        yield _memory_of_host()
        return
    health = npu_health() if device.kind == "npu" else {}
    for index in range(device.count):
        yield _one(device.module, device.kind, index)
    for card, state in health.items():
        if state.upper() != "OK":
            yield Finding(
                "wrong", f"npu-smi calls card {card} {state}", f"npu-smi info -t health -i {card}", f"card_{card}"
            )


def _one(module: Any, kind: str, index: int) -> Finding:
    import torch

    name, about = module.get_device_name(index), f"{kind}_{index}"
    free, total = module.mem_get_info(index)
    said = f"{kind}:{index}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    whole = torch.arange(64 * 64, dtype=torch.float32).remainder(7).reshape(64, 64)
    there = whole.to(torch.device(kind, index))
    if not torch.equal((there @ there).cpu(), whole @ whole):  # small whole numbers: no rounding anywhere
        return Finding(
            "wrong", f"{said}; a product of whole numbers comes out wrong", "do not train on this card", about
        )
    if free < LEAST_SHARE * total:
        tool = _SMI if kind == "npu" else "nvidia-smi"
        return Finding("note", f"{said}: others use the rest", f"see {tool} for their processes", about)
    return Finding("ok", said, about=about)


def _memory_of_host() -> Finding:
    from difftrain.device import host

    available = host.available_bytes()
    if available is None:
        return Finding("note", "the system does not say how much memory is free", about="memory")
    said = f"{available / 2**30:.1f} GiB of memory can be taken"
    if available < 2 << 30:
        return Finding("note", said, "end other processes, or raise the container's limit", "memory")
    return Finding("ok", said, about="memory")


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
