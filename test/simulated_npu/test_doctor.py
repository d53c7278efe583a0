"""The doctor on simulated devices: all is well on two; what is wrong is found, and said with its remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIBRARY = HERE.parents[1] / "library"
# not those that measure the host: its packages, its folders, its speed
DEVICE = "installation,variables,memory,attention,kernels,overflow,precision,compiler"


def doctor(*words: str, switches: tuple[str, ...] = (), expect: int = 0, **env: str) -> dict[str, dict[str, Any]]:
    """Return the findings by name."""
    command = [
        HERE / "run",
        "--devices=2",
        *switches,
        sys.executable,
        "-m",
        "difftrain.cli",
        "doctor",
        "--json",
        *words,
    ]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(LIBRARY)]))}
    done = subprocess.run(command, env=os.environ | paths | env, capture_output=True, text=True, timeout=240)
    assert done.returncode == expect, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_two_devices_that_are_well(tmp_path: Path) -> None:
    counts = tmp_path / "c"
    found = doctor(f"--checks={DEVICE},collective", switches=(f"--counts={counts}",), TASK_QUEUE_ENABLE="2")
    assert {check["verdict"] for check in found.values()} <= {"ok", "note"}
    assert "2 found" in found["devices.npu"]["found"] and "npu:0" in found["devices.chosen"]["found"]
    assert {name for name in found if name.startswith("memory.")} == {"memory.npu_0", "memory.npu_1"}
    for each in ("fp32", "fp16", "bf16"):
        assert f"attention in {each}, fused" in found[f"attention.{each}"]["found"]
        for kernel in ("rms_norm", "rotary", "swiglu", "geglu", "adamw"):
            assert f"{kernel} in {each}, fused" in found[f"kernels.{kernel}_{each}"]["found"]
    assert "2 npu devices (hccl) " in found["collective"]["found"]
    assert found["overflow"]["verdict"] == "ok" and found["compiler"]["verdict"] == "note"
    assert "compatible" in found["installation.cann"]["found"]
    ran = [json.loads(path.read_text()) for path in tmp_path.glob("c.*.json")]
    assert sum(each.get("npu::npu_fusion_attention", 0) for each in ran) == 15  # three precisions, five cases
    assert sum(each.get("npu::npu_fusion_attention_grad", 0) for each in ran) == 15


def test_fp16_that_saturates(tmp_path: Path) -> None:
    found = doctor("--checks=overflow", switches=("--saturate",), expect=1)
    assert found["overflow"]["verdict"] == "wrong" and "65504" in found["overflow"]["found"]
    assert "--mixed_precision=bf16" in found["overflow"]["remedy"]


def test_an_older_cann() -> None:
    found = doctor("--checks=installation,attention", switches=("--cann=7.0.0",), expect=1)
    assert re.search(r"CANN 7\.0\.0 .*older .* 8\.5", found["installation.cann"]["found"])
    assert found["installation.cann"]["verdict"] == "wrong" and "CANN 9.2.0" in found["installation.cann"]["remedy"]
    fp32 = found["attention.fp32"]
    assert fp32["verdict"] == "note" and "attention in fp32, sdpa" in fp32["found"]
    assert "CANN 7.0.0" in fp32["found"] and fp32["remedy"]
    assert found["attention.bf16"]["verdict"] == found["attention.fp16"]["verdict"] == "ok"


def test_a_torch_npu_of_another_torch(tmp_path: Path) -> None:
    about = tmp_path / "torch_npu-2.9.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.9.0\n")
    # in front of the wheel's own metadata, behind the hook that makes the devices
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('difftrain.cli', run_name='__main__')"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(LIBRARY)])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "doctor", "--json", "--checks=installation,attention", "--device=npu"],
        env=os.environ | env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name in ("installation.torch_npu", "devices.npu"):
        assert "torch_npu 2.9.0 needs torch 2.9.0, found torch 2.13" in found[name]["found"]
        assert " torch_npu==2.13.0" in found[name]["remedy"]
    assert not any(name.startswith("attention") for name in found)
