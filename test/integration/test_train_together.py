"""One rank works longer than a collective would wait, and its errors reach every rank."""

from __future__ import annotations

import json
import time

from difftrain.testing.spawn import run_ranks

HERE = __file__


def long_work() -> None:
    """Wait four times the groups' time-out for rank 0, then let it fail."""
    from difftrain.contracts import DataFault
    from difftrain.device import choose
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks
    from difftrain.train.together import for_all

    def fail() -> None:
        raise DataFault("no pictures")

    launch = Launch.from_environment()
    with Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size), timeout_min=3 / 60) as ranks:
        found = for_all(ranks, ranks.rank == 0, lambda: time.sleep(12) or "made")
        try:
            for_all(ranks, ranks.rank == 0, fail)
        except DataFault as fault:
            said = str(fault)
    print(json.dumps([found, said]))


def test_waiting_has_no_limit_and_errors_are_shared() -> None:
    for ended in run_ranks(2, f"{HERE}::long_work"):
        assert json.loads(ended.out.splitlines()[-1]) == ["made", "no pictures"]
