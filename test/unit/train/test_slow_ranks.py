"""Which rank is slow, and by what, from sums that heartbeats carry."""

from __future__ import annotations

import pytest

from difftrain.train.diagnosis.slow_ranks import LOOKS, RankPace, SlowRanks

STEP_S = 1.0


class Job:
    """Four ranks whose seconds per step are given, looked at time after time."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.slow = SlowRanks(self.said.append)
        self.sums = [RankPace() for _ in range(4)]

    def look(
        self, *, data: dict[int, float] | None = None, output: dict[int, float] | None = None, steps: int = 10
    ) -> None:
        for rank, before in enumerate(self.sums):
            self.sums[rank] = RankPace(
                before.steps + steps,
                before.wall_s + steps * STEP_S,
                before.data_s + steps * (data or {}).get(rank, 0.02),
                before.output_s + steps * (output or {}).get(rank, 0.2),
            )
        self.slow.look([str(pace) for pace in self.sums])


def test_ranks_that_are_alike_are_not_named() -> None:
    job = Job()
    for _ in range(6):
        job.look(data={1: 0.025}, output={2: 0.21})  # noise
    for _ in range(6):
        job.look(data=dict.fromkeys(range(4), 0.5))  # slow data for all: that is no rank's fault
    assert not job.said


@pytest.mark.parametrize(("cause", "rank"), [("data", 3), ("compute", 0)])
def test_a_rank_that_is_slow_time_after_time_is_named_once_with_its_rate_and_cause(cause: str, rank: int) -> None:
    job = Job()
    slow = {"data": {rank: 0.4}} if cause == "data" else {"output": {rank: 0.4}}
    for number in range(LOOKS + 4):
        job.look(**slow)
        assert len(job.said) == (number >= LOOKS), "the first look has nothing to compare with"
    assert job.said == job.slow.notes
    assert f"rank {rank} of 4" in job.said[0] and f"({cause})" in job.said[0] and "0.4 s" in job.said[0]


def test_a_rank_that_recovers_is_named_anew_when_it_is_slow_again() -> None:
    job = Job()
    for _ in range(2):
        for _ in range(LOOKS + 1):
            job.look(data={2: 0.5})
        job.look()
    assert len(job.said) == 2
    for _ in range(3):
        for _ in range(LOOKS - 1):
            job.look(data={2: 0.5})
        job.look()
    assert len(job.said) == 2, "a hiccup now and then is no slow rank"


def test_a_look_before_there_is_enough_to_see_says_nothing() -> None:
    job = Job()
    job.slow.look(["", "", "", ""])
    for _ in range(3 * LOOKS):
        job.look(data={1: 0.5}, steps=1)
    assert len(job.said) <= 1, "looks wait until there are some steps between them"
