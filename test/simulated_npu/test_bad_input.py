"""What goes wrong on machines with NPUs: each ends with a sentence that says what to do, in time, and without a traceback."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from doors import Door, metrics, wait_for, write_pictures

from difftrain.testing.spawn import free_port, run_ranks

SITE = Path(os.environ["SIMULATED_NPU_LIBRARIES"]).parent / "site"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    return Door(write_pictures(tmp_path_factory.mktemp("pictures")), tmp_path_factory.mktemp("cache"))


def bare(*paths: Path) -> dict[str, str]:
    """Return the environment of a machine that has the wheel and no CANN; paths come before the wheel."""
    nothing = dict.fromkeys(("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH"), "")
    left = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}  # by torch_npu, to what a process starts that has imported it
    return {"PYTHONPATH": os.pathsep.join(map(str, (*paths, SITE))), **nothing, **left}


def said(output: str, *parts: str) -> None:
    assert "Traceback" not in output, output
    for part in parts:
        assert part in output, output


def test_the_wheel_without_cann(door: Door, tmp_path: Path) -> None:
    output = door.run(door.flags(tmp_path / "out", "--device=npu"), expect=2, **bare())
    said(output, "--device: npu ", "torch_npu cannot ", ": libhccl.so, of CANN", "set_env.sh")
    assert not (tmp_path / "out").exists()


def test_the_wheel_without_cann_is_no_error_where_no_npu_is_asked_for(door: Door, tmp_path: Path) -> None:
    output = door.run(door.flags(tmp_path / "out", steps=1), **bare())
    said(output, "device: cpu (no npu: torch_npu cannot ", ": libhccl.so, of CANN", "step=1 ")


def test_a_wheel_of_another_torch(door: Door, tmp_path: Path) -> None:
    about = tmp_path / "other" / "torch_npu-2.9.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.9.0\n")
    output = door.run(door.flags(tmp_path / "out", "--device=npu"), expect=2, **bare(tmp_path / "other"))
    said(output, "torch_npu 2.9.0 needs torch 2.9.0, found torch 2.13", " torch_npu==2.13.0")


def test_no_device(door: Door, tmp_path: Path) -> None:
    output = door.run(door.flags(tmp_path / "out", "--device=npu"), expect=2, SIMULATED_NPU_DEVICES="0")
    said(output, "--device: npu ", "torch_npu sees ", "npu-smi info")


def test_fewer_devices_than_processes(door: Door, tmp_path: Path) -> None:
    flags = door.flags(tmp_path / "out", "--device=npu", batch=1)
    env = place(0, free_port()) | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "5"}
    output = door.run(flags, expect=2, **env)  # as torchrun starts the first of five
    said(output, "5 npu devices", "4 found", "--nproc_per_node=4")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_device_out_of_memory(door: Door, tmp_path: Path) -> None:
    output = door.run(door.flags(tmp_path / "out", "--device=npu", batch=8), expect=1, SIMULATED_NPU_MEMORY_GIB="0.03")
    said(output, "npu:0 ", "--train_batch_size=4 --gradient_accumulation_steps=2")


def place(rank: int, port: int) -> dict[str, str]:
    """Return what a launcher tells a rank of two."""
    me = str(rank)
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": me, "LOCAL_RANK": me, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **there}


@pytest.mark.nightly  # on CPUs: test/integration/test_distributed_ranks.py
def test_a_rank_that_is_killed_ends_the_others_with_a_sentence(door: Door, tmp_path: Path) -> None:
    """Without torchrun, which would end them itself."""
    out = tmp_path / "out"
    port = free_port()
    flags = door.flags(out, "--device=npu", "--ddp_timeout=1", batch=1, steps=5000)
    ranks = [door._start([sys.executable, str(door.path), *flags], **place(rank, port)) for rank in range(2)]
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out))
        ranks[1].send_signal(signal.SIGKILL)
        start = time.monotonic()
        output, _ = ranks[0].communicate(timeout=90)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert ranks[0].returncode == 1 and time.monotonic() - start < 75, output
    said(output, "rank 0: rank 1 of 2 ")


def joins() -> None:
    from difftrain.contracts import TrainingFault
    from difftrain.device import choose
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks

    launch = Launch.from_environment()
    device = choose("npu", launch.local_rank, launch.local_size)
    start = time.monotonic()
    try:
        Ranks.open(launch, device, 0.05)
    except TrainingFault as fault:
        print(f"{time.monotonic() - start:.1f} {fault}")


def test_an_address_that_cannot_be_reached() -> None:
    away = {**place(1, free_port()), "MASTER_ADDR": "10.255.255.1", "PYTHONPATH": os.pathsep.join(sys.path)}
    (ended,) = run_ranks(1, f"{__file__}::joins", env=away, timeout_s=90)
    took, told = ended.out.strip().split(" ", 1)
    assert float(took) < 45
    said(told, "2 ranks at 10.255.255.1:", " 0.05 min", "firewall")
