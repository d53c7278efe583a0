"""Variables of the environment that make training slow, wrong or hang, each with what would be right.

Ranges: CANN's environment variable reference (8.5 and 9.0); torch_npu's documentation of its own variables.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from difftrain.contracts import ConfigFault
from difftrain.device import ascend, choice, npu_settings
from difftrain.device.health import Context, HealthFinding

SENSIBLE_S = 300  # below it, a rank that compiles or saves is taken for lost


def check(context: Context) -> Iterator[HealthFinding]:
    """Look at the variables that matter for what is here."""
    findings = list(_cuda())
    if importlib.util.find_spec("torch_npu") is not None or ascend.nodes() or context.kind == "npu":
        findings += [*_waiting(), *_queue(), *_places(), *_devices(), *_overflow(), *_network(), *_logs()]
    yield from findings
    if not any(finding.verdict != "ok" for finding in findings):
        yield HealthFinding("ok", "no environment variable is in the way")


def _get(name: str) -> str:
    return os.environ.get(name, "").strip()


def _cuda() -> Iterator[HealthFinding]:
    if _get("CUDA_LAUNCH_BLOCKING") == "1":
        yield HealthFinding(
            "note", "CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel", "unset it", "CUDA_LAUNCH_BLOCKING"
        )


def _waiting() -> Iterator[HealthFinding]:
    """Judge HCCL's time-outs: how long ranks try to connect, and how long a collective waits for one."""
    name, text = "HCCL_CONNECT_TIMEOUT", _get("HCCL_CONNECT_TIMEOUT")
    low, high = npu_settings.CONNECT_RANGE_S
    if text and not (text.isdecimal() and low <= int(text) <= high):
        yield HealthFinding(
            "wrong", f"{name}={text}: HCCL takes {low} to {high} (seconds)", f"export {name}=1800", name
        )
    elif text and int(text) < SENSIBLE_S:
        yield HealthFinding(
            "note",
            f"{name}={text}: ranks time out before the first compilation and caching are done on every machine",
            f"export {name}=1800, or give --ddp_timeout (minutes), which sets it",
            name,
        )
    elif text:
        yield HealthFinding("ok", f"{name}={text}", about=name)
    yield from _executing()


def _executing() -> Iterator[HealthFinding]:
    name, text, event = "HCCL_EXEC_TIMEOUT", _get("HCCL_EXEC_TIMEOUT"), _get("HCCL_EVENT_TIMEOUT")
    if text and not text.replace(".", "", 1).isdecimal():
        yield HealthFinding("wrong", f"{name}={text} is not a number of seconds", f"export {name}=1800", name)
        return
    if text and float(text) == 0:
        yield HealthFinding("note", f"{name}=0: a lost rank is waited for forever", f"export {name}=1800", name)
    elif text and float(text) < SENSIBLE_S:
        remedy = f"export {name}=1800, or give --ddp_timeout (minutes), which sets it"
        yield HealthFinding("note", f"{name}={text}: too short while one rank saves a checkpoint", remedy, name)
    elif text:
        yield HealthFinding("ok", f"{name}={text}", about=name)
    if event.isdecimal() and int(event) and text and int(event) <= float(text):
        yield HealthFinding(
            "wrong",
            f"HCCL_EVENT_TIMEOUT={event} must be above {name}={text}",
            "unset HCCL_EVENT_TIMEOUT",
            "HCCL_EVENT_TIMEOUT",
        )


def _queue() -> Iterator[HealthFinding]:
    name, text = "TASK_QUEUE_ENABLE", _get("TASK_QUEUE_ENABLE")
    if text not in ("", "0", "1", "2"):
        yield HealthFinding("wrong", f"{name}={text}: must be 0, 1 or 2", f"export {name}=2", name)
    elif text == "0":
        yield HealthFinding(
            "note", f"{name}=0: the host launches every kernel itself, which is slow", f"export {name}=2", name
        )
    elif text != "2":
        yield HealthFinding(
            "note", f"{name} is {text or 'unset, so 1'}", f"export {name}=2 is faster (test/env_npu.sh does)", name
        )
    if _get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield HealthFinding(
            "note",
            "ASCEND_LAUNCH_BLOCKING=1: the host waits for every kernel, and the task queue is off",
            "unset it; it is for debugging",
            "ASCEND_LAUNCH_BLOCKING",
        )


def _places() -> Iterator[HealthFinding]:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
        if _get(name) and not Path(_get(name)).is_dir():
            yield HealthFinding("wrong", f"{name}={_get(name)} is not a folder", ascend.source_cann(), name)


def _devices() -> Iterator[HealthFinding]:
    visible = _get("ASCEND_RT_VISIBLE_DEVICES")
    parts = [part.strip() for part in visible.split(",")] if visible else []
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        what = f"ASCEND_RT_VISIBLE_DEVICES={visible}: numbers separated by commas, each once"
        yield HealthFinding("wrong", what, "such as 0,1,2,3", "ASCEND_RT_VISIBLE_DEVICES")
    try:
        choice.ascend_index()
    except ConfigFault as error:
        for fault in error.faults:
            yield HealthFinding("wrong", f"{fault.where}: {fault.what}", fault.remedy, "ASCEND_DEVICE_ID")
    else:
        if _get("ASCEND_DEVICE_ID") and parts:
            what = f"both ASCEND_DEVICE_ID={_get('ASCEND_DEVICE_ID')} and ASCEND_RT_VISIBLE_DEVICES={visible} are set"
            yield HealthFinding("note", f"{what}; the ranks of a job ignore the first", "set one", "ASCEND_DEVICE_ID")


def _overflow() -> Iterator[HealthFinding]:
    try:
        npu_settings.check_environment()
    except ConfigFault as error:
        for fault in error.faults:
            name = fault.where.removeprefix("environment ")
            yield HealthFinding("wrong", f"{name}={_get(name)}: {fault.what}", fault.remedy, name)


def _network() -> Iterator[HealthFinding]:
    address = _get("HCCL_IF_IP")
    if address and not _is_ours(address):
        yield HealthFinding(
            "wrong",
            f"HCCL_IF_IP={address} is not an address of this machine",
            "set the address of the network that leads to the other machines, or unset it (test/env_npu.sh finds it)",
            "HCCL_IF_IP",
        )
    if _get("HCCL_WHITELIST_DISABLE") == "0" and not Path(_get("HCCL_WHITELIST_FILE") or os.devnull).is_file():
        yield HealthFinding(
            "wrong",
            "HCCL_WHITELIST_DISABLE=0 without a file in HCCL_WHITELIST_FILE: no machine can join",
            "export HCCL_WHITELIST_DISABLE=1",
            "HCCL_WHITELIST_DISABLE",
        )


def _is_ours(address: str) -> bool:
    """Tell whether an address is one of this machine's: a socket can be bound to it."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _logs() -> Iterator[HealthFinding]:
    name = "ASCEND_GLOBAL_LOG_LEVEL"
    if _get(name) in ("0", "1"):
        what = f"{name}={_get(name)}: writing debug and info logs costs more time than small kernels"
        yield HealthFinding("note", what, f"export {name}=3", name)
    if _get("ASCEND_SLOG_PRINT_TO_STDOUT") == "1":
        what = "ASCEND_SLOG_PRINT_TO_STDOUT=1: CANN's log is mixed into the training log"
        yield HealthFinding("note", what, "export ASCEND_SLOG_PRINT_TO_STDOUT=0", "ASCEND_SLOG_PRINT_TO_STDOUT")
