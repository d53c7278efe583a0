"""Copies between host and device, and the memory that a device has."""

import os
import subprocess
import sys

import pytest
import simulator
import torch
import warm

NPU = "npu:0"


def test_a_copy_that_does_not_wait_needs_pinned_memory():
    pageable = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="non-blocking copy from pageable"):
        pageable.to(NPU, non_blocking=True)
    pinned = pageable.pin_memory()
    assert pinned.is_pinned() and not pageable.is_pinned()
    with simulator.counting() as counted:
        there = pinned.to(NPU, non_blocking=True)
        back = torch.empty(4).pin_memory()
        back.copy_(there, non_blocking=True)
    assert not simulator.host_syncs(counted)
    torch.npu.synchronize()
    assert torch.equal(back, pageable)
    with pytest.raises(RuntimeError, match="non-blocking copy to pageable"):
        torch.empty(4).copy_(there, non_blocking=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8], ids=str)
def test_values_survive_the_way_there_and_back(dtype):
    x = torch.arange(24).view(2, 3, 4).transpose(0, 2).to(dtype)
    assert torch.equal(x.to(NPU).cpu(), x)
    assert torch.equal(x.to(NPU).float().cpu(), x.float())
    assert torch.equal(x.to("npu:1").to(NPU).cpu(), x)


def test_memory_is_measured():
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    x = torch.empty(1 << 20, device=NPU)
    assert torch.npu.memory_allocated() - before >= 4 << 20
    assert torch.npu.max_memory_allocated() - before >= 4 << 20
    del x
    assert torch.npu.memory_allocated() == before


PROBE = """
import torch, torch_npu
free, total = torch.npu.mem_get_info()
assert total == 1 << 28, total
kept = torch.empty(1 << 26, dtype=torch.uint8, device="npu")
try:
    torch.empty(1 << 28, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    assert "NPU out of" in str(error), error
    del kept
    torch.npu.empty_cache()
    torch.empty(1 << 27, dtype=torch.uint8, device="npu")
    print("refused, and on")
"""


@pytest.mark.parametrize("segments", ["False", "True"])
def test_a_device_that_is_full_raises_the_real_error(segments):
    environ = os.environ | {
        "SIMULATED_NPU_MEMORY_GIB": "0.25",
        "PYTORCH_NPU_ALLOC_CONF": f"expandable_segments:{segments}",
    }
    done = warm.completed([sys.executable, "-c", PROBE], env=environ)
    assert "refused, and on" in done.stdout, done.stderr


def _told(code, **switches):
    done = warm.completed([sys.executable, "-c", code], env=os.environ | switches)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


VISIBLE = """
import os, sys, torch
for listed in sys.argv[1:]:  # each counts once in a process: of torch_npu
    if os.fork() == 0:
        if listed != "all":
            os.environ["ASCEND_RT_VISIBLE_DEVICES"] = listed
        import torch_npu
        print(torch.npu.device_count(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_visible_devices_are_the_ones_that_count():
    environ = os.environ | {"SIMULATED_NPU_DEVICES": "3", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", VISIBLE, "all", "2,0", "0,7,1"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.stdout.split() == ["3", "2", "1"], done.stderr


def test_fp16_overflows_or_saturates():
    code = "import torch, torch_npu; print((torch.full((1,), 6e4, device='npu').half() * 2).item())"
    assert _told(code) == "inf"
    assert _told(code, SIMULATED_NPU_SATURATE="1") == "65504.0"
    assert _told(code, INF_NAN_MODE_FORCE_DISABLE="1") == "65504.0"  # the wheel's own switch on this chip


@pytest.mark.nightly  # of the simulator alone: tests of doors start so
def test_a_plain_import_of_torch_brings_the_device():
    code = "import torch; print(torch.ones(2, device='npu').sum().item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[-1] == "2.0", done.stderr
