"""One rank works longer than a collective would wait, and its errors reach every rank."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from difftrain.testing.spawn import run_ranks

HERE = __file__


def long_work() -> None:
    """Wait four times the groups' time-out for rank 0, let it fail, then rank 1 beside it; last, be a machine each."""
    from difftrain.contracts import DataFault
    from difftrain.device import choose
    from difftrain.distributed.collective import Events, on_each_machine, run_on
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks

    def fail() -> None:
        raise DataFault("no pictures")

    launch = Launch.from_environment()
    with Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size), timeout_min=3 / 60) as ranks:
        found = run_on(ranks, ranks.rank == 0, lambda: time.sleep(12) or "made")
        try:
            run_on(ranks, ranks.rank == 0, fail)
        except DataFault as fault:
            said = str(fault)
        events = Events()

        def leave_where_it_is_in_vain() -> None:
            if ranks.rank == 1:
                raise DataFault("no more pictures")
            assert events.stop.wait(60)

        try:
            run_on(ranks, True, leave_where_it_is_in_vain, events)
        except DataFault as fault:
            said += f", {fault}"
        machine = dataclasses.replace(ranks, local_rank=0, local_size=1)
        own = on_each_machine(machine, lambda: f"made by {ranks.rank}")
        shared = on_each_machine(ranks, lambda: f"made by {ranks.rank}")
    print(json.dumps([found, said, own, shared]))


@pytest.mark.nightly
def test_waiting_has_no_limit_and_errors_are_shared() -> None:
    for ended in run_ranks(2, f"{HERE}::long_work"):
        found = json.loads(ended.out.splitlines()[-1])
        assert found == ["made", "no pictures, no more pictures", f"made by {ended.rank}", "made by 0"]
