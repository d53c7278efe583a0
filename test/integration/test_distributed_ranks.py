"""Ranks as processes: they agree, they sum, and none is left behind when one dies. Also what optimizers share."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from difftrain.distributed.loopback import is_loopback
from difftrain.testing.spawn import run_ranks

HERE = __file__


def _open(timeout_min: float = 1.0):
    from difftrain.device import choose
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks

    launch = Launch.from_environment()
    return Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size), timeout_min)


def healthy() -> None:
    """Everything that needs no rank to fail, in one launch."""
    with _open() as ranks:
        seen = {"agreement": _agreement(ranks), "counted": _counted(ranks), "sharding": _sharding(ranks)}
    print(json.dumps(seen))


def _agreement(ranks: Any) -> dict[str, Any]:
    import torch

    total = ranks.sum_(torch.tensor([float(ranks.rank + 1), 2.0]))
    seen = {
        "agree": ranks.agree(10 * ranks.rank),
        "any_one": ranks.any(ranks.rank == 1),
        "any_none": ranks.any(False),
        "broadcast": [ranks.broadcast({"from": ranks.rank}), ranks.broadcast(ranks.rank, source=2)],
        "gather": ranks.gather(chr(ord("a") + ranks.rank)),
        "sum": total.tolist(),
        "logger": ranks.is_logger,
        "leads": ranks.leads_node,
        "place": [ranks.rank, ranks.size, ranks.local_rank, ranks.local_size],
    }
    ranks.barrier()
    return seen


def _counted(ranks: Any) -> dict[str, Any]:
    """Take numbers as fast as each rank can, and add up what was taken."""
    following, tally = ranks.counter("numbers"), ranks.tally("sum")
    taken = []
    while (number := following()) < 50:
        taken.append(number)
    tally(len(taken))
    ranks.barrier()
    return {"taken": sorted(n for share in ranks.gather(taken) for n in share), "sum": tally(0)}


def _sharding(ranks: Any) -> dict[str, Any]:
    """Train the same weights whole and with the state sharded; say how far they part and how much state is here."""
    import torch

    from difftrain.config.schema.sections import OptimizerSection
    from difftrain.contracts import Group
    from difftrain.optim import inner, make_optimizer, make_schedule

    ended = {}
    for kind in ("AdamW", "oss"):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(n)) for n in (50, 30, 20, 10)]
        groups = [
            Group("unet", [(f"w{i}", weights[i]) for i in (0, 1)], 1e-2),
            Group("te1", [(f"w{i}", weights[i]) for i in (2, 3)], 1e-3),
        ]
        section = OptimizerSection(type=kind, learning_rate=1e-2, args=("weight_decay=0.1",), scheduler="cosine")
        optimizer = make_optimizer(section, groups, dp_size=ranks.size)
        schedule = make_schedule(section, optimizer, 6)
        for step in range(6):
            for i, weight in enumerate(weights):
                weight.grad = torch.sin(weight.detach() * (step + 1 + i))
            optimizer.step()
            schedule.step()
        state = inner(optimizer).state
        ended[kind] = (torch.cat([w.detach() for w in weights]), sum(s["exp_avg"].numel() for s in state.values()))
    apart = (ended["AdamW"][0] - ended["oss"][0]).abs().max().item()
    return {"apart": apart, "whole": ended["AdamW"][1], "shard": ended["oss"][1]}


@pytest.fixture(scope="module")
def three_ranks() -> list[dict[str, Any]]:
    return [json.loads(e.out.splitlines()[-1]) for e in run_ranks(3, f"{HERE}::healthy")]


def test_three_ranks_agree_and_sum(three_ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(three_ranks):
        assert seen["agreement"] == {
            "agree": 20,
            "any_one": True,
            "any_none": False,
            "broadcast": [{"from": 0}, 2],
            "gather": ["a", "b", "c"],
            "sum": [6.0, 6.0],
            "logger": rank == 0,
            "leads": rank == 0,
            "place": [rank, 3, rank, 3],
        }


def test_numbers_are_handed_out_once_to_whoever_asks(three_ranks: list[dict[str, Any]]) -> None:
    for seen in three_ranks:
        assert seen["counted"] == {"taken": list(range(50)), "sum": 50}


def test_oss_shards_the_state_and_trains_the_same(three_ranks: list[dict[str, Any]]) -> None:
    seen = [rank["sharding"] for rank in three_ranks]
    assert all(s["apart"] == 0.0 and s["whole"] == 110 for s in seen), seen
    assert sum(s["shard"] for s in seen) == 110 and all(s["shard"] < 110 for s in seen), seen


def one_dies(how: str) -> None:
    import torch

    with _open() as ranks:
        ranks.barrier()
        if ranks.rank == 1:
            if how == "raises":
                raise ValueError("a fault of rank 1 alone")
            if how == "exits":
                os._exit(7)
            if how == "exits while they sum":
                time.sleep(0.3)
                os._exit(7)
        for _ in range(100):
            if how == "exits while they sum":
                ranks.sum_(torch.ones(1))  # of the devices' group, as gradients are
            else:
                ranks.barrier()
            time.sleep(0.01)
    print("done", file=sys.stderr)


@pytest.mark.parametrize("how", ["raises", "exits", "exits while they sum"])
def test_a_rank_that_dies_takes_the_others_with_it_at_once(how: str) -> None:
    ended = run_ranks(3, f"{HERE}::one_dies", how, check=False, timeout_s=50)
    assert ended[1].code == (1 if how == "raises" else 7)
    assert how != "raises" or "ValueError: a fault of rank 1 alone" in ended[1].err
    for other in (ended[0], ended[2]):
        assert other.code == 1, other.err
        (line,) = re.findall(rf"RankLost: rank {other.rank}: (.*)", other.err)
        assert "rank 1 of 3 " in line and ("error" in line) == (how == "raises"), line
        assert not re.search(r"gloo|\.cc|peer|socket", line), line  # no library's own text
    assert max(e.seconds for e in ended) < 40  # well within the minute that a collective would wait


def one_stays_away(given_up: str) -> None:
    ranks = _open(timeout_min=0.05)
    ranks.barrier()
    if ranks.rank == 1:
        end = time.monotonic() + 12
        while not Path(given_up).exists() and time.monotonic() < end:
            time.sleep(0.05)
        os._exit(0)
    start = time.monotonic()
    try:
        ranks.barrier()
    finally:
        print(f"waited {time.monotonic() - start:.2f}", flush=True)
        Path(given_up).touch()
        ranks.abort()


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    ended = run_ranks(2, f"{HERE}::one_stays_away", tmp_path / "given up", check=False, timeout_s=60)
    assert ended[0].code == 1
    assert "RankLost: rank 0: rank 1 of 2 is alive" in ended[0].err and "0.05 min" in ended[0].err
    assert 2.5 < float(ended[0].out.split()[-1]) < 12.0


def one_is_stopped(who: str) -> None:
    from difftrain.distributed import heartbeats

    heartbeats.NOTICE_S = 2.0
    with _open(timeout_min=0.1) as ranks:
        processes = ranks.gather(os.getpid())
        if ranks.rank == int(who):
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            ranks.barrier()
        finally:
            if ranks.rank == 2:  # once the others have told what they saw: a stopped process ends by nothing else
                time.sleep(3)
                os.kill(processes[int(who)], signal.SIGKILL)


@pytest.mark.parametrize(
    "who",
    [pytest.param(1, id="any rank", marks=pytest.mark.nightly), pytest.param(0, id="the rank that keeps the store")],
)
def test_a_stopped_rank_is_named_when_the_time_is_up(who: int) -> None:
    ended = run_ranks(3, f"{HERE}::one_is_stopped", who, check=False, timeout_s=60)
    assert [rank.code for rank in ended] == [-signal.SIGKILL if rank == who else 1 for rank in range(3)]
    text = "\n".join(rank.err for rank in ended)
    for rank in {0, 1, 2} - {who}:
        (line,) = re.findall(rf"RankLost: rank {rank}: (.*)", text)
        assert not re.search(r"gloo|\.cc|peer|socket|wait timeout", line), line
        assert "stopped" in line and ("rank 1 of 3 " in line) == (who == 1), line
        stacks = dumped(text, rank)
        assert "rank" in stacks[0] and "waits" in stacks[0], stacks
        assert any("in one_is_stopped" in line for line in stacks), stacks
    assert not dumped(text, who)
    if who == 1:  # and before, by the rank beside it
        assert re.findall(r"^rank 2: rank 1 of 3 .* 2 s; .* in \w+$", text, re.MULTILINE), text
        assert text.count("(last seen ") == 2, text


def dumped(text: str, rank: int) -> list[str]:
    """Return the lines that a rank has printed of its stacks."""
    return re.findall(rf"^\[rank {rank}\] (.*)", text, re.MULTILINE)


def one_hangs(who: str) -> None:
    from difftrain.distributed import heartbeats

    heartbeats.END_S = 1.0
    with _open(timeout_min=0.05) as ranks:
        ranks.barrier()
        ranks.doing("step 7")
        if ranks.rank == int(who):
            endless_loop()
        ranks.barrier()


def endless_loop() -> None:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "who",
    [pytest.param(0, id="the rank that keeps the store"), pytest.param(1, id="any rank", marks=pytest.mark.nightly)],
)
def test_a_rank_that_hangs_prints_where_and_is_ended(who: int) -> None:
    """Nobody started these ranks who would end them: the one that hangs ends by its own thread, once the other has left."""
    ended = run_ranks(2, f"{HERE}::one_hangs", who, check=False, timeout_s=60)
    assert [rank.code for rank in ended] == [1, 1]
    (line,) = re.findall(rf"RankLost: rank {1 - who}: (.*)", ended[1 - who].err)
    assert f"rank {who} of 2 is alive" in line and "step 7" in line, line
    for rank in ended:
        stacks = dumped(rank.err, rank.rank)
        assert f"rank {rank.rank} of 2, step 7" in stacks[0] and ("not wait" in stacks[0]) == (rank.rank == who), stacks
        assert any("in endless_loop" in line for line in stacks) == (rank.rank == who), stacks
    (why,) = re.findall(f"^rank {who} of 2: (.*)", ended[who].err, re.MULTILINE)
    assert (f"rank {1 - who} has left" in why) == (who == 0) and ("store" in why) == (who == 1), why
    assert max(rank.seconds for rank in ended) < 40


def listening() -> None:
    sys.path.append(str(Path(HERE).parents[1] / "support"))
    from ports import listens_at

    with _open() as ranks:
        ranks.barrier()
        print(json.dumps(listens_at(os.getpid())))
        ranks.barrier()


def test_ranks_of_one_machine_listen_on_the_loopback_alone() -> None:
    for ended in run_ranks(2, f"{HERE}::listening"):
        found = json.loads(ended.out.splitlines()[-1])
        assert found and all(is_loopback(address) for address in found), found


def nobody_else_starts() -> None:
    _open(timeout_min=0.03)


def test_ranks_that_do_not_meet_say_where() -> None:
    ended = run_ranks(
        1, f"{HERE}::nobody_else_starts", check=False, timeout_s=60, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    )
    assert ended[0].code == 1
    assert "TrainingFault: rank 0: 2 ranks at 127.0.0.1:" in ended[0].err


AWAY = ("10.255.255.1", "no-such-machine.invalid")


def nobody_answers() -> None:
    from difftrain.contracts import TrainingFault
    from difftrain.distributed import ranks

    ranks.NOTICE_S = 0.1
    for master in AWAY:
        os.environ["MASTER_ADDR"] = master
        start = time.monotonic()
        try:
            _open(timeout_min=0.03)
        except TrainingFault as fault:
            print(f"{time.monotonic() - start:.1f} {fault}")


def test_a_master_that_cannot_be_reached_is_named_within_the_timeout() -> None:
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    (ended,) = run_ranks(1, f"{HERE}::nobody_answers", check=False, timeout_s=60, env=env)
    told = ended.out.splitlines()
    assert len(told) == len(AWAY), ended
    for master, line in zip(AWAY, told):
        assert float(line.split()[0]) < 15.0
        assert f"rank 1: waits for 2 ranks at {master}:" in ended.err
        assert f"rank 1: 2 ranks at {master}:" in line and " 0.03 min" in line, line
        assert "firewall" in line and "master address" in line
