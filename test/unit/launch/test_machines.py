"""Where processes run: counts, clusters' variables, cards, and torchrun's words."""

from __future__ import annotations

import pytest
from refusals import is_about, names

from difftrain.launch import flags, machines
from difftrain.launch.machines import Devices, Where

CPU, CUDA, NPU = Devices("cpu", 2), Devices("cuda", 4), Devices("npu", 8)
CARDS = {"1m_1p": 1, "1m_8p": 8, "nm_np": None}


def place(layout: str, device: Devices, *argv: str, **environ: str) -> Where:
    return machines.where(layout, CARDS[layout], flags.read(list(argv), {}), device, environ)


def test_eight_processes_on_a_cpu() -> None:
    found = place("1m_8p", CPU)
    assert found.world_size == found.processes == 8 and found.threads == 1 and not found.faults
    assert names(found.sentence, "8", "CPU", "one thread")


def test_one_process_takes_the_cores() -> None:
    assert place("1m_1p", CPU).threads == 2
    assert place("1m_1p", Devices("cpu", 64)).threads == 8


@pytest.mark.parametrize("device", [CUDA, Devices("npu", 4)])
def test_too_few_cards_name_how_many_there_are(device: Devices) -> None:
    found = place("1m_8p", device)
    (fault,) = found.faults
    assert names(fault, f"8 {device.kind} devices", "4", "--nproc_per_node=4")
    assert not place("1m_8p", device, "--nproc_per_node=4").faults


def test_several_machines_take_the_cards_they_have() -> None:
    assert place("nm_np", NPU, "--nnodes=2", "--master_ip=10.0.0.1").world_size == 16
    assert place("nm_np", CPU, "--nnodes=2", "--master_ip=10.0.0.1").world_size == 2


def test_cluster_variables_are_defaults() -> None:
    found = place("nm_np", CPU, "--master_ip=10.0.0.1", PET_NNODES="3", PET_NODE_RANK="2")
    assert (found.nodes, found.node_rank) == (3, 2)
    given = place(
        "nm_np", CPU, "--nnodes=2", "--node_rank=1", "--master_ip=10.0.0.1", PET_NNODES="3", PET_NODE_RANK="2"
    )
    assert (given.nodes, given.node_rank) == (2, 1)
    assert place("1m_1p", CPU, PET_NNODES="3", PET_NODE_RANK="2").world_size == 1


def test_master_address() -> None:
    assert "--master_ip=" in place("nm_np", CPU, "--nnodes=2").sentence  # derived, and told to the others
    assert place("nm_np", CPU, "--nnodes=2", MASTER_ADDR="10.0.0.9").master == "10.0.0.9"
    assert place("nm_np", CPU, "--nnodes=2", "--node_rank=1").faults[0].startswith("--master_ip: machine 1 needs")


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["--nnodes=2", "--node_rank=2", "--master_ip=a"], ["--node_rank", "machines", "2, got 2"]),
        (["--nnodes=0"], ["--nnodes", "1", "got 0"]),
        (["--nproc_per_node=0"], ["--nproc_per_node", "1", "got 0"]),
    ],
)
def test_impossible_counts(argv: list[str], facts: list[str]) -> None:
    assert is_about(place("nm_np", CPU, *argv).faults[0], *facts)


def test_one_machine_scripts_refuse_several() -> None:
    assert is_about(place("1m_8p", CPU, "--nnodes=2").faults[0], "--nnodes", "one machine", "2")
    assert is_about(place("1m_1p", CPU, "--nproc_per_node=2").faults[0], "--nproc_per_node", "one device", "2")


def test_torchrun_words() -> None:
    assert place("1m_8p", CPU).torchrun()[2:] == [
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
        "--local_addr=127.0.0.1",
    ]
    words = place("nm_np", CPU, "--nnodes=2", "--node_rank=1", "--master_ip=10.0.0.1").torchrun()
    assert words[2:] == ["--node_rank=1", "--master_addr=10.0.0.1", "--master_port=8989"]
    assert place("1m_1p", CPU, "--master_port=9000").torchrun()[-1] == "--master_port=9000"


def test_what_an_outer_launcher_left_is_gone() -> None:
    kept = place("1m_1p", CPU).environment({"RANK": "3", "PET_NNODES": "2", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h"})
    assert kept["HOME"] == "/h" and not {"RANK", "PET_NNODES", "TORCHELASTIC_RUN_ID"} & kept.keys()
    assert kept["OMP_NUM_THREADS"] == "2"
    assert place("1m_1p", CPU).environment({"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


def test_the_card_of_a_one_card_run() -> None:
    assert place("1m_1p", CUDA, "--device_id=3").environment({})["CUDA_VISIBLE_DEVICES"] == "3"
    assert place("1m_1p", NPU, "--device_id=5").environment({})["ASCEND_DEVICE_ID"] == "5"
    assert "CUDA_VISIBLE_DEVICES" not in place("1m_1p", CUDA).environment({})
    assert is_about(place("1m_1p", CUDA, "--device_id=4").faults[0], "--device_id", "4", "devices 0, 1, 2, 3")
    hidden = place("1m_1p", Devices("cuda", 2), "--device_id=6", CUDA_VISIBLE_DEVICES="6,7")
    assert not hidden.faults and hidden.environment({})["CUDA_VISIBLE_DEVICES"] == "6"
    assert (
        "CUDA_VISIBLE_DEVICES=6,7"
        in place("1m_1p", Devices("cuda", 2), "--device_id=0", CUDA_VISIBLE_DEVICES="6,7").faults[0]
    )
    assert not place("1m_1p", CPU, "--device_id=3").faults


def test_output_index_comes_from_the_device() -> None:
    assert machines.device_index({"ASCEND_DEVICE_ID": "5"}) == 5
    assert machines.device_index({}) == 0


def test_what_cann_put_on_the_path_stays_on_it() -> None:
    assert machines.with_library({"PYTHONPATH": "/cann/python", "A": "1"}) == {
        "PYTHONPATH": f"{machines.LIBRARY}:/cann/python",
        "A": "1",
    }
    assert machines.with_library({})["PYTHONPATH"] == str(machines.LIBRARY)


def test_torchrun_loads_no_device() -> None:
    environ = place("1m_1p", NPU).environment({})
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_restarts_are_torchruns() -> None:
    assert not any("restart" in word for word in place("1m_8p", CPU).torchrun())
    for layout in ("1m_1p", "1m_8p", "nm_np"):
        found = place(layout, CPU, "--max_restarts=3", "--master_ip=10.0.0.1")
        assert not found.faults and "--max_restarts=3" in found.torchrun()
    (fault,) = flags.read(["--max_restarts=-1"], {}).faults
    assert names(fault, "--max_restarts", "-1")
