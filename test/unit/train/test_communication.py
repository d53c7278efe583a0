"""Payloads of an update that take no run to be checked: pipelines, small numbers of ranks, speeds."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from difftrain.train.estimate.communication import (
    Cluster,
    Collective,
    Kind,
    ModelSize,
    Spread,
    collectives,
    kinds,
    scaling,
    sent,
)

POINT: Kind = get_args(Kind)[-1]
MODEL = ModelSize(
    (600, 400), 1000, blocks=600, cuts=((50.0, 40.0), (70.0, 60.0), (90.0, 80.0)), stages=(300, 200, 400, 100)
)


def test_rings_send_what_their_authors_say() -> None:
    assert sent("all-reduce", 100.0, 4) == 150.0 and sent("reduce-scatter", 100.0, 4) == 75.0
    assert sent("all-gather", 100.0, 1) == 0.0 and sent(POINT, 100.0, 8) == 100.0


@pytest.mark.parametrize("way", ["ddp", "oss", "fairscale", "zero1", "zero2", "zero3", "fsdp"])
def test_one_rank_sends_nothing(way: str) -> None:
    assert collectives(Spread(way, 1), MODEL) == ()


def test_the_busiest_stage_counts_and_gradients_go_among_replicas() -> None:
    spread = Spread("pipeline", 8, stages=4, micro=3)
    forward_and_back = 3 * (90.0 + 60.0)  # of the third stage: to the fourth, and back to the second
    assert collectives(spread, MODEL) == (
        Collective(POINT, forward_and_back, 4, apart=2),
        Collective("all-reduce", 4.0 * 400, 2),
    )
    alone = collectives(replace(spread, ranks=4), MODEL)
    assert [item.kind for item in alone] == [POINT]
    # two pieces of the model on each of two devices: the first sends twice forward and once back
    interleaved = collectives(Spread("pipeline", 2, stages=2, micro=1), replace(MODEL, stages=(500, 500)))
    assert interleaved[0].payload == max(50.0 + 90.0 + 60.0, 70.0 + 40.0 + 80.0)


def test_hybrid_sharding_sends_shards_alone_to_other_machines() -> None:
    spread = Spread("fsdp", 32, shard=8, micro=2)
    gathered, reduced, among = collectives(spread, MODEL)
    assert (gathered.payload, gathered.among) == (4.0 * 2 * (1000 + 600), 8)
    assert (reduced.payload, reduced.among) == (4.0 * 1000, 8)
    assert among == Collective("all-reduce", 4.0 * 1000 / 8, 4, apart=8)
    cluster = Cluster(inside=10.0, outside=1.0)
    assert cluster.seconds(among) == among.sent and cluster.seconds(gathered) == gathered.sent / 10.0
    assert collectives(replace(spread, reshards=False), MODEL)[0].payload == 4.0 * 2 * 1000


def test_efficiency_lies_between_no_overlap_and_all_of_it() -> None:
    cluster = Cluster(flops=1.0, inside=1.0)
    figures = scaling(Spread("ddp", 2), MODEL, 8000.0, cluster)
    assert figures.communication_s == 4000.0 == sum(kinds(figures.exchanged).values())
    assert figures.efficiency == (8000 / 12000, 1.0) and figures.step_s == (8000.0, 12000.0)
    piped = scaling(Spread("pipeline", 4, stages=4, micro=12), replace(MODEL, cuts=((0.0, 0.0),) * 3), 100.0, cluster)
    assert piped.bubble == 3 / 15 and piped.efficiency[1] == pytest.approx(0.8)
