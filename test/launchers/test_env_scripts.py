"""env_npu.sh and env_cuda.sh, sourced by a real shell: found or not, overridable, and quiet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = Path(__file__).resolve().parents[1]
NPU = {
    "ASCEND_GLOBAL_LOG_LEVEL",
    "ASCEND_SLOG_PRINT_TO_STDOUT",
    "ASCEND_GLOBAL_EVENT_ENABLE",
    "TASK_QUEUE_ENABLE",
    "COMBINED_ENABLE",
    "HCCL_WHITELIST_DISABLE",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
    "HCCL_BUFFSIZE",
    "PYTORCH_NPU_ALLOC_CONF",
    "MULTI_STREAM_MEMORY_REUSE",
}


def source(script: str, tmp_path: Path, **environ: str) -> dict[str, str]:
    """Return the environment after sourcing a script under `set -euo pipefail`, as the launchers do."""
    command = f'set -euo pipefail; source "{TEST / script}"; case $- in *e*u*|*u*e*) ;; *) exit 9 ;; esac; env -0'
    base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", command], env={**base, **environ}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if "=" in entry)


@pytest.fixture
def cann(tmp_path: Path) -> Path:
    """CANN's install information, naming a folder whose set_env.sh uses an unset variable and a failing command."""
    toolkit = tmp_path / "Ascend" / "ascend-toolkit"
    toolkit.mkdir(parents=True)
    (toolkit / "set_env.sh").write_text(
        "here=/cann python=/cann/python root=/cann\n"
        'export LD_LIBRARY_PATH=/cann:$LD_LIBRARY_PATH\nfalse\nexport CANN_SOURCED="1"\n'
    )
    info = tmp_path / "ascend_cann_install.info"
    info.write_text(f"Toolkit_Version=8.0\nToolkit_Install_Path={tmp_path / 'Ascend'}\n")
    return info


def test_without_cann_nothing_is_set(tmp_path: Path) -> None:
    found = source("env_npu.sh", tmp_path, ASCEND_CANN_INSTALL_INFO=str(tmp_path / "none"))
    assert not NPU & found.keys()


def test_with_cann_its_script_and_the_variables_are_there(tmp_path: Path, cann: Path) -> None:
    found = source("env_npu.sh", tmp_path, ASCEND_CANN_INSTALL_INFO=str(cann))
    assert found["CANN_SOURCED"] == "1" and found["LD_LIBRARY_PATH"].startswith("/cann:")
    assert found.keys() >= NPU
    assert found["TASK_QUEUE_ENABLE"] == "1"  # no torch_npu here to know better
    assert "HCCL_IF_IP" not in found


@pytest.mark.parametrize("name", ["nnae", "cann"])  # cann: the folder of 8.5 and later
def test_other_folders_are_found_too(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "Ascend" / name
    folder.mkdir(parents=True)
    (folder / "set_env.sh").write_text(f"export CANN_SOURCED={name}\n")
    found = source("env_npu.sh", tmp_path, ASCEND_CANN_INSTALL_INFO=str(tmp_path / "none"))
    assert found["CANN_SOURCED"] == name


def test_every_variable_can_be_set_from_outside(tmp_path: Path, cann: Path) -> None:
    mine = dict.fromkeys(NPU, "7")
    found = source(
        "env_npu.sh", tmp_path, ASCEND_CANN_INSTALL_INFO=str(cann), HCCL_IF_IP="10.1.2.3", MASTER_IP="127.0.0.1", **mine
    )
    assert {name: found[name] for name in NPU} == mine and found["HCCL_IF_IP"] == "10.1.2.3"


@pytest.fixture
def tools(tmp_path: Path) -> str:
    """A PATH whose `ip` knows a route to 10.0.0.1 only, and whose `getent` knows master-0 only."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "ip": '[ "$4" = 10.0.0.1 ] || exit 1; echo "$4 via 10.0.0.254 dev eth1 src 10.0.0.7 uid 0 \\\\    cache"',
        "getent": '[ "$1 $2" = "ahostsv4 master-0" ] || exit 2; echo "10.0.0.1        STREAM master-0"',
    }
    for name, line in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("master", ["10.0.0.1", "master-0"])
def test_hccl_takes_the_address_that_routes_to_the_master(tmp_path: Path, cann: Path, tools: str, master: str) -> None:
    found = source("env_npu.sh", tmp_path, ASCEND_CANN_INSTALL_INFO=str(cann), MASTER_IP=master, PATH=tools)
    assert found["HCCL_IF_IP"] == "10.0.0.7"


def test_hccl_is_left_to_guess_where_nothing_routes_to_the_master(tmp_path: Path, cann: Path, tools: str) -> None:
    found = source("env_npu.sh", tmp_path, ASCEND_CANN_INSTALL_INFO=str(cann), MASTER_IP="nowhere", PATH=tools)
    assert "HCCL_IF_IP" not in found


def test_cuda_needs_a_driver(tmp_path: Path) -> None:
    assert "NCCL_DEBUG" not in source("env_cuda.sh", tmp_path) or Path("/proc/driver/nvidia/version").exists()
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    found = source("env_cuda.sh", tmp_path, PATH=path, NCCL_SOCKET_IFNAME="eth3")
    assert found["NCCL_DEBUG"] == "WARN" and found["NCCL_SOCKET_IFNAME"] == "eth3"
    assert not {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"} & found.keys()
    assert source("env_cuda.sh", tmp_path, PATH=path, NCCL_DEBUG="INFO")["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize(("version", "queue"), [("2.1.0.post17", "1"), ("2.4.0", "2"), ("2.13.0", "2")])
def test_the_task_queue_goes_by_torch_npu(tmp_path: Path, cann: Path, version: str, queue: str) -> None:
    info = tmp_path / "site" / f"torch_npu-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
    found = source(
        "env_npu.sh",
        tmp_path,
        ASCEND_CANN_INSTALL_INFO=str(cann),
        PYTHONPATH=str(info.parent),
        difftrain_python=sys.executable,
    )
    assert found["TASK_QUEUE_ENABLE"] == queue


def test_an_allocator_that_is_set_by_its_other_name_is_left(tmp_path: Path, cann: Path) -> None:
    found = source(
        "env_npu.sh", tmp_path, ASCEND_CANN_INSTALL_INFO=str(cann), PYTORCH_ALLOC_CONF="max_split_size_mb:128"
    )
    assert found["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:128" and "PYTORCH_NPU_ALLOC_CONF" not in found


def test_the_toolkit_that_is_named_comes_first(tmp_path: Path, cann: Path) -> None:
    other = tmp_path / "other" / "latest"
    other.mkdir(parents=True)
    (other.parent / "set_env.sh").write_text("export CANN_SOURCED=other\n")
    found = source("env_npu.sh", tmp_path, ASCEND_CANN_INSTALL_INFO=str(cann), ASCEND_TOOLKIT_HOME=str(other))
    assert found["CANN_SOURCED"] == "other"


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("if true; then\n", 0, ", NPUs will not be "),
        ("exit 3\n", 3, "(install CANN "),
    ],
)
def test_a_broken_script_of_canns_is_named(tmp_path: Path, cann: Path, content: str, code: int, said: str) -> None:
    script = tmp_path / "Ascend" / "ascend-toolkit" / "set_env.sh"
    script.write_text(content)
    done = subprocess.run(
        ["bash", "-c", f'set -euo pipefail; source "{TEST / "env_npu.sh"}"; echo went on'],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ASCEND_CANN_INSTALL_INFO": str(cann)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code and str(script) in done.stderr and said in done.stderr
    assert done.stdout == ("" if code else "went on\n")
