"""What Slurm, Kubernetes, Volcano, ModelArts and torchrun say of a job's machines, and what is said where they say half."""

from __future__ import annotations

import pytest
from refusals import is_about, names

from difftrain.launch import flags, machines, schedulers
from difftrain.launch.machines import Devices, Where

SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02,7]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_GPUS_ON_NODE": "4",
}
MODELARTS = {
    "MA_NUM_HOSTS": "2",
    "MA_NUM_GPUS": "8",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
}
PYTORCHJOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
TRAINER = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29500",
    "PET_NPROC_PER_NODE": "auto",
    "JOB_COMPLETION_INDEX": "1",
}
VOLCANO = {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "a-worker-0.a,a-worker-1.a,a-worker-2.a"}
JOBSET = {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "w-0-0.w", "NPROC_PER_NODE": "8"}


def where(environ: dict[str, str], *argv: str, layout: str = "nm_np") -> Where:
    return machines.where(layout, None, flags.read(list(argv), {}), Devices("npu", 8), environ)


@pytest.mark.parametrize(
    ("environ", "nodes", "rank", "processes", "meeting"),
    [
        (SLURM, 3, 1, 4, ("node01", 10041)),
        (MODELARTS, 2, 1, 8, ("job-worker-0.job", 8989)),
        (PYTORCHJOB, 2, 1, 8, ("job-master-0", 23456)),
        (TRAINER, 2, 1, 8, ("run-node-0-0.run", 29500)),
        (VOLCANO, 3, 1, 8, ("a-worker-0.a", 8989)),
        (JOBSET, 2, 1, 8, ("w-0-0.w", 8989)),
    ],
)
def test_a_job_finds_its_place(
    environ: dict[str, str], nodes: int, rank: int, processes: int, meeting: tuple[str, int]
) -> None:
    found = where(environ)
    assert not found.faults
    assert (found.nodes, found.node_rank, found.processes, found.master, found.port) == (
        nodes, rank, processes, *meeting,
    )  # fmt: skip
    (note,) = found.notes  # said once, with the variable of each value
    read = schedulers.read(environ)
    assert all(names(note, f"{name}={value}", read.origins[name]) for name, value in read.values.items())


def test_every_row_is_met_by_a_case_above() -> None:
    cases = (SLURM, MODELARTS, PYTORCHJOB, TRAINER, VOLCANO, JOBSET)
    assert {schedulers.read(case).scheduler for case in cases} == {row.name for row in schedulers.SCHEDULERS}


def test_a_flag_counts_more_than_any_variable() -> None:
    flags_given = ("--nnodes=2", "--node_rank=0", "--master_ip=10.0.0.1", "--master_port=9000", "--nproc_per_node=2")
    found = where(SLURM, *flags_given)
    assert not found.faults and not found.notes
    assert (found.nodes, found.node_rank, found.processes, found.master, found.port) == (2, 0, 2, "10.0.0.1", 9000)
    assert where(SLURM, "--node_rank=2").node_rank == 2 and where(SLURM, "--node_rank=2").nodes == 3


@pytest.mark.parametrize(
    ("environ", "missing", "flag"),
    [
        (SLURM, "SLURM_NODEID", "node_rank"),
        (MODELARTS, "VC_TASK_INDEX", "node_rank"),
        (MODELARTS, "VC_WORKER_HOSTS", "master_ip"),
        (PYTORCHJOB, "RANK", "node_rank"),
        (PYTORCHJOB, "WORLD_SIZE", "nnodes"),
        (PYTORCHJOB, "MASTER_ADDR", "master_ip"),
        (TRAINER, "PET_NODE_RANK", "node_rank"),
        (TRAINER, "PET_MASTER_ADDR", "master_ip"),
        (VOLCANO, "VC_TASK_INDEX", "node_rank"),
        (JOBSET, "NNODES", "nnodes"),
    ],
)
def test_half_set_variables_are_an_error_that_a_flag_mends(environ: dict[str, str], missing: str, flag: str) -> None:
    half = {name: value for name, value in environ.items() if name != missing}
    (fault,) = where(half).faults
    assert missing in fault.partition(":")[0] and names(fault, f"--{flag}")
    mended = {"node_rank": "1", "nnodes": "2", "master_ip": "10.0.0.1"}[flag]
    assert not where(half, f"--{flag}={mended}").faults


@pytest.mark.parametrize(
    ("changed", "variable", "value"),
    [
        ({"SLURM_STEP_NUM_NODES": "two"}, "SLURM_STEP_NUM_NODES", "two"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST", "node[1-"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID", "3"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT", "x"),
        ({"SLURM_GPUS_ON_NODE": "16"}, "SLURM_GPUS_ON_NODE", "16"),
        ({"SLURM_STEP_NUM_TASKS": "24"}, "SLURM_STEP_NUM_TASKS", "24"),
        ({"SLURM_STEP_ID": "", "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "n[1-3]"}, "SLURM_STEP_ID", "srun"),
    ],
)
def test_what_a_scheduler_says_wrongly_is_named(changed: dict[str, str], variable: str, value: str) -> None:
    (fault,) = where(SLURM | changed).faults
    assert is_about(fault, variable) and value in fault


def test_two_kinds_of_tasks_need_volcanos_plugin() -> None:
    (fault,) = where(VOLCANO | {"VC_MASTER_HOSTS": "a-master-0.a"}).faults
    assert is_about(fault, "VC_MASTER_HOSTS", "RANK", "WORLD_SIZE")
    assert not where(VOLCANO | PYTORCHJOB | {"VC_MASTER_HOSTS": "job-master-0"}).faults


def test_what_torchrun_leaves_in_a_shell_is_no_scheduler() -> None:
    assert schedulers.find({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3"}) is None
    assert schedulers.find({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}) is None
    assert where({}).nodes == 1


def test_one_machine_asks_nobody() -> None:
    alone = where({"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"})
    assert alone.nodes == 1 and not alone.faults and not alone.port_given
    several = where(SLURM, layout="1m_np")
    assert several.world_size == 8 and not several.faults
    assert names(several.notes[0], "SLURM_STEP_NUM_NODES=3")  # two machines would lie idle


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
        ("a1,b[2-3]x,c", ["a1", "b2x", "b3x", "c"]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_slurms_lists(text: str, hosts: list[str]) -> None:
    assert list(schedulers.expand_nodes(text)) == hosts


@pytest.mark.parametrize("text", ["node[", "node]1", "node[1-]", "node[3-1]", "node[a-b]", "a,,b", "node[[1]]", "n[]"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        list(schedulers.expand_nodes(text))
