"""The launch environment: whole, absent, half set, nonsense; and the single process that needs no group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from difftrain.contracts import ConfigFault
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks

WHOLE = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "8989",
}


def test_whole_and_absent() -> None:
    assert Launch.from_environment(WHOLE) == Launch(5, 8, 1, 4, "10.0.0.1", 8989)
    assert Launch.from_environment(WHOLE).distributed
    assert Launch.from_environment({}) == Launch()
    assert not Launch.from_environment({}).distributed


def test_what_clusters_leave_in_every_pod_starts_nothing() -> None:
    pod = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "8989", "PET_NNODES": "4", "PET_NODE_RANK": "2"}
    assert Launch.from_environment(pod) == Launch()
    assert Launch.from_environment({"RANK": "", "WORLD_SIZE": " "}) == Launch()


def test_one_process_needs_no_meeting_place() -> None:
    assert Launch.from_environment({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}) == Launch()


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_is_refused_by_name(missing: str) -> None:
    env = {name: value for name, value in WHOLE.items() if name != missing}
    with pytest.raises(ConfigFault) as caught:
        Launch.from_environment(env)
    text = str(caught.value)
    assert f"but {missing} missing" in text and "torchrun" in text
    assert all(f"{name}={value}" in text for name, value in env.items() if name != "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("RANK", "8", "from 0 to 7"),
        ("RANK", "-1", "from 0 to 7"),
        ("RANK", "one", "'one'"),
        ("LOCAL_RANK", "4", "from 0 to 3"),
        ("WORLD_SIZE", "0", "from 1"),
        ("LOCAL_WORLD_SIZE", "9", "from 1 to 8"),
        ("MASTER_PORT", "70000", "from 1 to 65535"),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: str, told: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        Launch.from_environment(WHOLE | {name: value})
    assert f"environment {name}: got {value!r}" in str(caught.value) and told in str(caught.value)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ConfigFault) as caught:
        Launch.from_environment(WHOLE | {"RANK": "x", "MASTER_PORT": "y"})
    assert len(caught.value.faults) == 2


def test_launchers_without_a_local_size() -> None:
    env = {name: value for name, value in WHOLE.items() if name != "LOCAL_WORLD_SIZE"}
    assert Launch.from_environment(env).local_size == 2  # at least up to this local rank
    assert Launch.from_environment(env | {"LOCAL_SIZE": "4"}).local_size == 4


def test_a_single_process_has_no_group() -> None:
    with Ranks.open(Launch(), choose("cpu")) as ranks:
        assert not dist.is_initialized() and ranks.control is None
        assert (ranks.rank, ranks.size, ranks.is_logger, ranks.leads_node) == (0, 1, True, True)
        assert ranks.agree(3) == 3 and ranks.any(True) and not ranks.any(False)
        assert ranks.broadcast("x") == "x" and ranks.gather([1]) == [[1]]
        tensor = torch.ones(2)
        assert ranks.sum_(tensor) is tensor and tensor.tolist() == [1.0, 1.0]
        ranks.barrier()
