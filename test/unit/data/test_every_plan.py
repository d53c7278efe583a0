"""Epochs that use every record, as kohya's: exactly once a repeat, on any number of ranks, by arithmetic alone."""

import itertools
import math
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import is_about

from difftrain.config import TrainingSection
from difftrain.contracts import Bucket, DataFault
from difftrain.data.plan.every import EveryPlan
from difftrain.data.plan.plan import RankShare, changes, kind_of, total_steps, why_no_step
from difftrain.data.plan.table_build import PlanSource
from difftrain.data.plan.whole import WholePlan
from difftrain.testing.tables import Item, by_id, make_tables

SIZES = tuple(Bucket(32 * a, 32 * b) for a, b in itertools.product(range(1, 6), repeat=2))


def items_of(counts, sources=(0,)):
    return [
        Item(f"{b}/{i}", SIZES[b], source=sources[i % len(sources)]) for b, n in enumerate(counts) for i in range(n)
    ]


@pytest.fixture
def tables(tmp_path):
    made = iter(range(1000))
    return lambda *args, **more: make_tables(tmp_path / str(next(made)), *args, **more)


def drawn(plan, step):
    """Return what a step is made of: (bucket, ((key, occurrence), ...)) of each micro batch."""
    return [(uses.bucket.bucket, tuple((d.key, d.occurrence) for d in plan.draws(uses))) for uses in plan.parts(step)]


# ---------------------------------------------------------------- once a repeat, and no more


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    repeats=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    batch=st.integers(1, 9),
    unit=st.integers(1, 12),
    seed=st.integers(0, 2**40),
)
def test_an_epoch_uses_every_record_as_often_as_it_is_repeated(
    tmp_path_factory, counts, repeats, batch, unit, seed
) -> None:
    items = items_of(counts, sources=range(len(repeats)))
    plan = EveryPlan(make_tables(tmp_path_factory.mktemp("t") / "t", items, repeats), seed, (batch,), unit)
    wanted = {item.key: repeats[item.source] for item in items}
    uses = Counter(item.bucket for item in items for _ in range(repeats[item.source]))
    micro_batches = sum(math.ceil(n / batch) for n in uses.values())
    for epoch in range(3):
        assert plan.steps(epoch) == math.ceil(micro_batches / unit)
        steps = range(plan.total_steps(epoch), plan.total_steps(epoch + 1))
        assert [plan.locate(step) for step in steps] == [(epoch, index) for index in range(len(steps))]
        parts = [part for step in steps for part in drawn(plan, step)]
        assert len(parts) == micro_batches
        found = Counter(draw for _, draws in parts for draw in draws)
        assert found == {
            (key, epoch * times + occurrence): 1 for key, times in wanted.items() for occurrence in range(times)
        }
        # a micro batch is of one bucket, and at most one of each bucket is smaller
        known = {item.key: item.bucket for item in items}
        assert all(known[key] == bucket for bucket, draws in parts for key, _ in draws)
        smaller = Counter(bucket for bucket, draws in parts if len(draws) < batch)
        assert smaller == {bucket: 1 for bucket, n in uses.items() if n % batch}
        # a step is full, but for the last
        sizes = [len(plan.parts(step)) for step in steps]
        assert sizes[:-1] == [unit] * (len(steps) - 1) and sizes[-1] == micro_batches - unit * (len(steps) - 1)
        for step in steps:
            assert plan.counts(step) == [(u.bucket, len(u.rows)) for u in plan.parts(step)]
            assert plan.size(step) == sum(len(draws) for _, draws in drawn(plan, step)) <= batch * unit


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    repeats=st.lists(st.sampled_from([0.25, 0.5, 1, 1.2, 2.75]), min_size=1, max_size=2),
    batch=st.integers(1, 5),
    unit=st.integers(1, 4),
)
def test_fractions_of_repeats_come_out_even(tmp_path_factory, counts, repeats, batch, unit) -> None:
    items = items_of(counts, sources=range(len(repeats)))
    plan = EveryPlan(make_tables(tmp_path_factory.mktemp("t") / "t", items, repeats), 1, (batch,), unit)
    round_ = 20  # epochs after which fourths and fifths are whole
    found, step = Counter(), 0
    for epoch in range(2 * round_):
        assert plan.total_steps(epoch) == step
        for index in range(plan.steps(epoch)):
            assert plan.locate(step) == (epoch, index)
            found.update(key for _, draws in drawn(plan, step) for key, _ in draws)
            step += 1
    assert found == {item.key: 2 * round_ * repeats[item.source] for item in items}
    assert plan.mean_batch == pytest.approx(sum(found.values()) / step)
    far = 10**9
    assert plan.locate(plan.total_steps(far))[0] >= far and plan.total_steps(far) == far // round_ * plan.total_steps(
        round_
    )


def test_fractions_that_never_come_round_are_refused(tables) -> None:
    made = tables(items_of([5], sources=(0, 1)), [0.0001, 1.0003 + 1 / 9973])
    with pytest.raises(DataFault) as fault:
        EveryPlan(made, 1, (2,), 1)
    assert is_about(fault.value, "--epoch_batches", "65,536")


def test_each_data_set_has_its_own_batch(tables) -> None:
    items = items_of([7, 5], sources=(0,)) + [Item(f"b/{i}", SIZES[0], source=1) for i in range(9)]
    plan = EveryPlan(tables(items, [PlanSource(1, 0), PlanSource(1, 1)]), 3, (4, 2), 3)
    assert plan.global_batches == (12, 6)
    assert plan.steps(0) == math.ceil((2 + 2 + 5) / 3)
    keys = [key for step in range(plan.steps(0)) for _, draws in drawn(plan, step) for key, _ in draws]
    assert sorted(keys) == sorted(item.key for item in items)


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("unit", [1, 2, 4, 6])
def test_ranks_share_the_micro_batches_of_a_step(tables, unit) -> None:
    items = items_of([13, 9, 4, 1], sources=(0, 1))
    plan = EveryPlan(tables(items, (1, 2)), 3, (4,), unit)
    for ranks in [d for d in range(1, unit + 1) if unit % d == 0]:
        accumulation = unit // ranks
        for step in range(plan.total_steps(2)):
            rounds = [
                [plan.micro_batch(step, number, RankShare(rank, ranks, (4,), accumulation)) for rank in range(ranks)]
                for number in range(accumulation)
            ]
            # either every rank has something to run in a round, or none has
            assert all(len({uses is None for uses in row}) == 1 for row in rounds)
            shared = [uses for row in rounds for uses in row if uses is not None]
            counted = [uses for uses in shared if not uses.idle]
            whole = plan.parts(step)
            assert len(counted) == len(whole)
            for mine, planned in zip(counted, whole, strict=True):
                assert mine.bucket == planned.bucket and np.array_equal(mine.rows, planned.rows)
                assert np.array_equal(mine.occurrences, planned.occurrences)
            for uses in shared[len(counted) :]:
                assert uses.idle and len(uses.rows) == 1
                assert any(uses.rows[0] in planned.rows for planned in whole)


def test_other_ranks_than_it_was_made_for_are_refused(tables) -> None:
    plan = EveryPlan(tables(items_of([9])), 3, (2,), 4)
    with pytest.raises(ValueError, match="4"):
        plan.micro_batch(0, 0, RankShare(0, 3, (2,), 1))


# ---------------------------------------------------------------- where it is like whole batches, and what a digest says


def test_full_micro_batches_of_one_device_are_drawn_as_whole_batches_are(tables) -> None:
    made = tables(items_of([12, 8, 4]))
    every, whole = EveryPlan(made, 5, (4,), 1), WholePlan(made, 5, 4)
    for step in range(24):
        bucket, draws = whole.batch(step)
        assert drawn(every, step) == [(bucket, tuple((d.key, d.occurrence) for d in draws))]


def test_epochs_and_seeds_are_shuffled_differently(tables) -> None:
    made = tables(items_of([13, 9]))
    plan = EveryPlan(made, 1, (2,), 2)
    epochs = [[drawn(plan, step) for step in range(plan.total_steps(e), plan.total_steps(e + 1))] for e in range(3)]
    keys = [[key for step in epoch for _, draws in step for key, _ in draws] for epoch in epochs]
    assert keys[0] != keys[1] != keys[2] and sorted(keys[0]) == sorted(keys[1])
    assert drawn(EveryPlan(made, 2, (2,), 2), 0) != drawn(plan, 0)
    copy = pickle.loads(pickle.dumps(plan))
    assert [drawn(copy, step) for step in range(12)] == [drawn(plan, step) for step in range(12)]


def test_the_digest_knows_the_kind_and_the_micro_batch_and_no_devices(tables) -> None:
    made = tables(items_of([13, 9]))
    plan, whole = EveryPlan(made, 1, (2,), 4), WholePlan(made, 1, 8)
    assert plan.global_batches == whole.global_batches and plan.digest != whole.digest
    assert kind_of(whole.describe()) == "whole" and kind_of(plan.describe()) == "every"
    assert "epoch_batches" not in whole.describe()  # version 0.5 wrote none
    assert changes(whole.describe(), plan.describe())[0].endswith("whole -> every")
    wider = EveryPlan(made, 1, (4,), 2)
    assert wider.digest != plan.digest and changes(plan.describe(), wider.describe()) == ["micro batch 2 -> 4"]


def test_an_epoch_can_begin_anywhere(tables) -> None:
    items = items_of([13, 9])
    plain, moved = EveryPlan(tables(items), 7, (4,), 2), EveryPlan(tables(items), 7, (4,), 2)
    moved.begin_epoch_at(1, 2)
    assert moved.locate(2) == (1, 0) and moved.total_steps(1) == 2
    for step in range(plain.steps(1)):
        assert drawn(moved, 2 + step) == drawn(plain, plain.total_steps(1) + step)
    assert plain.offset == 0 and moved.locate(-1) == (0, plain.steps(0) - 3)
    with pytest.raises(IndexError):
        plain.locate(-1)


# ---------------------------------------------------------------- kohya's figures: steps of one epoch, and of ten

THIRTY = [14, 10, 3, 3]
HUNDRED = [15, 10, 10, 9, 9, 7, 6, 6, 6, 5, 5, 3, 3, 2, 1, 1, 1, 1]
FIVE_HUNDRED = [44, 41, 38, 38, 38, 35, 35, 30, 27, 25, 25, 25, 22, 15, 12, 12, 10, 9, 9, 6, 4]
FIVE_THOUSAND = [
    230, 229, 229, 226, 214, 213, 211, 206, 203, 203, 201, 201, 199, 198, 193, 193, 188, 187, 185, 185, 184, 184, 182, 182, 174,
]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "batch", "accumulation", "ranks", "epochs", "every", "whole"),
    [
        (THIRTY, 8, 2, 1, 1, 3, 0),
        (THIRTY, 16, 1, 1, 3, 12, 3),
        (HUNDRED, 4, 1, 1, 1, 35, 17),
        (HUNDRED, 4, 1, 1, 10, 350, 244),
        (HUNDRED, 4, 4, 1, 1, 9, 0),
        (HUNDRED, 4, 4, 1, 10, 90, 53),
        (HUNDRED, 4, 1, 8, 1, 5, 0),
        (HUNDRED, 4, 1, 8, 10, 50, 21),
        (FIVE_HUNDRED, 4, 1, 8, 1, 17, 7),
        (FIVE_HUNDRED, 4, 1, 8, 10, 170, 141),
        (FIVE_THOUSAND, 4, 1, 8, 1, 158, 145),
        (FIVE_THOUSAND, 4, 1, 8, 10, 1580, 1547),
    ],
)
def test_updates_are_as_many_as_kohyas(tables, counts, batch, accumulation, ranks, epochs, every, whole) -> None:
    made = tables(items_of(counts))
    # kohya: epochs x ceil(batches of all buckets / devices / accumulation)
    assert every == epochs * math.ceil(sum(math.ceil(n / batch) for n in counts) / ranks / accumulation)
    length = TrainingSection(max_epochs=epochs)
    assert total_steps(length, EveryPlan(made, 1, (batch,), accumulation * ranks)) == every
    assert total_steps(length, WholePlan(made, 1, batch * accumulation * ranks)) == whole


def test_a_run_without_a_step_is_named_with_its_arithmetic(tables) -> None:
    fault = why_no_step(TrainingSection(max_epochs=1), WholePlan(tables(items_of(THIRTY)), 1, 16))
    for figure in ("30", "16", "14"):
        assert figure in fault.what
    assert "every" in fault.remedy


def test_records_are_those_of_the_tables(tables) -> None:
    items = items_of([5, 3])
    plan = EveryPlan(tables(items), 9, (2,), 2)
    for step in range(plan.steps(0)):
        for uses in plan.parts(step):
            assert all(by_id(items)[d.record_id].key == d.key for d in plan.draws(uses))
