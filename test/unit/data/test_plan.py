"""The epoch plan: exactly once a pass, nothing dropped, nothing that depends on order of listing or world size."""

import json
import pickle
import random
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import is_about, names

from difftrain.contracts import Bucket, DataFault
from difftrain.data.plan.plan import changes
from difftrain.data.plan.table_build import HeldOutSplit
from difftrain.data.plan.whole import WholePlan
from difftrain.testing.tables import Item, by_id, make_tables

SIZES = (Bucket(64, 64), Bucket(32, 96), Bucket(96, 32), Bucket(128, 64))


def items_of(counts, prefix="a", sources=(0,)):
    return [
        Item(f"{prefix}/{b}/{i}", SIZES[b], source=sources[i % len(sources)], shard=0)
        for b, count in enumerate(counts)
        for i in range(count)
    ]


def all_draws(plan, epochs):
    """Return (bucket, draws) of every step of the first epochs."""
    return [plan.batch(step) for step in range(plan.total_steps(epochs))]


@pytest.fixture
def tables(tmp_path):
    made = iter(range(1000))
    return lambda *args, **more: make_tables(tmp_path / str(next(made)), *args, **more)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    repeats=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    batch=st.integers(1, 12),
    seed=st.integers(0, 2**40),
)
def test_every_use_comes_exactly_once_a_pass(tmp_path_factory, counts, repeats, batch, seed):
    items = items_of(counts, sources=range(len(repeats)))
    tables = make_tables(tmp_path_factory.mktemp("t") / "t", items, repeats)
    plan = WholePlan(tables, seed, batch)
    epochs = batch  # after G epochs every bucket has been served exactly G times over: no remainder at all
    seen = {}
    for bucket, draws in all_draws(plan, epochs):
        assert len(draws) == batch
        for draw in draws:
            seen.setdefault(draw.key, []).append(draw.occurrence)
            assert by_id(items)[draw.record_id].key == draw.key
            assert by_id(items)[draw.record_id].bucket == bucket
    by_key = {item.key: repeats[item.source] for item in items}
    assert seen.keys() == by_key.keys()
    for key, occurrences in seen.items():
        assert sorted(occurrences) == list(range(by_key[key] * epochs))


def test_a_pass_is_complete_before_the_next_begins(tables):
    plan = WholePlan(tables(items_of([10])), 5, 4)
    stream = [d for _, draws in sorted_by_position(plan, 0, 8) for d in draws]
    for first in range(0, len(stream) - 10, 10):
        assert len({d.key for d in stream[first : first + 10]}) == 10
        assert {d.occurrence for d in stream[first : first + 10]} == {first // 10}


def sorted_by_position(plan, bucket, epochs):
    """Return the batches of one bucket in the order of its stream, whatever the epochs' shuffles."""
    placed = []
    for step in range(plan.total_steps(epochs)):
        epoch, index = plan.locate(step)
        served = plan.served(epoch)
        which, k = plan.arrangement.pick(epoch, index, plan.served(epoch + 1) - served)
        if which == bucket:
            placed.append((int(served[which]) + k, plan.batch(step)))
    placed.sort(key=lambda pair: pair[0])
    assert [place for place, _ in placed] == list(range(len(placed)))
    return [batch for _, batch in placed]


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=4), batch=st.integers(1, 50))
def test_epochs_own_their_share_and_every_step_is_located(tmp_path_factory, counts, batch):
    plan = WholePlan(make_tables(tmp_path_factory.mktemp("t") / "t", items_of(counts)), 1, batch)
    step = 0
    for epoch in range(12):
        expected = sum((epoch + 1) * n // batch - epoch * n // batch for n in counts)
        assert plan.steps(epoch) == expected
        for index in range(expected):
            assert plan.locate(step) == (epoch, index)
            step += 1
        assert plan.total_steps(epoch + 1) == step
    with pytest.raises(IndexError):
        plan.locate(-1)


def test_epochs_and_seeds_are_shuffled_differently(tables):
    made = tables(items_of([40, 24]))
    one, other = WholePlan(made, 1, 4), WholePlan(made, 2, 4)
    per_epoch = [[one.batch(s) for s in range(16 * e, 16 * e + 16)] for e in range(3)]
    assert one.steps(0) == one.steps(1) == one.steps(2) == 16
    orders = [tuple(d.key for _, draws in epoch for d in draws) for epoch in per_epoch]
    sequences = [tuple(bucket for bucket, _ in epoch) for epoch in per_epoch]
    assert len(set(orders)) == 3 and len(set(sequences)) == 3
    assert Counter(sequences[0]) == Counter(sequences[1])
    assert orders[0] != tuple(d.key for s in range(16) for d in other.batch(s)[1])
    assert [one.batch(s) for s in range(48)] == [WholePlan(made, 1, 4).batch(s) for s in range(48)]


def test_listing_order_does_not_matter(tables):
    items = items_of([13, 9, 4], sources=(0, 1))
    mixed = items[:]
    random.Random(3).shuffle(mixed)
    a, b = (WholePlan(tables(list_, (1, 3)), 7, 4) for list_ in (items, mixed))
    assert a.digest == b.digest
    assert [a.batch(s) for s in range(60)] == [b.batch(s) for s in range(60)]


def test_another_bucket_reshuffles_no_other_bucket(tables):
    few, more = items_of([0, 11, 7]), items_of([5, 11, 7])
    a, b = WholePlan(tables(few), 7, 4), WholePlan(tables(more), 7, 4)
    for size in (SIZES[1], SIZES[2]):
        streams = [
            [[(d.key, d.occurrence) for d in draws] for _, draws in sorted_by_position(p, bucket_of(p, size), 12)]
            for p in (a, b)
        ]
        shorter = min(map(len, streams))
        assert shorter > 5 and streams[0][:shorter] == streams[1][:shorter]


def bucket_of(plan, size):
    return [rows.bucket for rows in plan.buckets].index(size)


@pytest.mark.parametrize("order", ["random", "sequential"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_ranks_cut_the_same_global_batch(tables, world, order):
    items = [item._replace(shard=i % 7) for i, item in enumerate(items_of([30, 25]))]
    plan = WholePlan(tables(items, layout="key" if order == "random" else "shard"), 3, 12, order, streams=6, window=2)
    for step in (0, 1, 7, 23):
        bucket, whole = plan.batch(step)
        parts = [plan.batch(step, slice(rank, None, world)) for rank in range(world)]
        assert all(part[0] == bucket for part in parts)
        assert [parts[i % world][1][i // world] for i in range(12)] == whole


def test_starved_buckets_are_named_and_served(tables):
    plan = WholePlan(tables(items_of([20, 3])), 1, 8)
    assert [rows.bucket for rows in plan.starved] == [SIZES[1]]
    assert any("96x32 has 3 samples" in line and "every 2.7 epochs" in line for line in plan.lines())
    served = Counter(bucket for bucket, _ in all_draws(plan, 8))
    assert served == {SIZES[0]: 20, SIZES[1]: 3}


def test_fewer_records_than_a_batch_still_train(tables):
    plan = WholePlan(tables(items_of([1])), 1, 5)
    assert [plan.steps(e) for e in range(5)] == [0, 0, 0, 0, 1]
    assert plan.locate(0) == (4, 0)
    assert sorted(d.occurrence for d in plan.batch(0)[1]) == [0, 1, 2, 3, 4]


def test_digest_names_what_changed(tables):
    plan = WholePlan(tables(items_of([12, 5])), 1, 4)
    kept = json.loads(json.dumps(plan.describe()))  # as a checkpoint keeps it
    assert changes(kept, plan.describe()) == []
    grown = WholePlan(tables([*items_of([12, 5]), Item("new", SIZES[0])]), 1, 4)
    assert grown.digest != plan.digest
    count, bucket = changes(kept, grown.describe())
    assert names(count, "17 -> 18")
    assert is_about(bucket, "bucket 64x64", "12 -> 13 records") and bucket.count("12 -> 13") == 2
    renamed = WholePlan(tables([*items_of([12, 4]), Item("new", SIZES[1])]), 1, 4)
    assert renamed.digest != plan.digest
    [line] = changes(kept, renamed.describe())
    assert line.startswith("bucket 96x32: ") and "->" not in line  # as many records, but others
    seed, batch, bucket, gone = changes(kept, WholePlan(tables(items_of([17])), 2, 8).describe())
    assert names(seed, "seed", "1 -> 2") and names(batch, "batch", "4 -> 8") and names(gone, "96x32")
    assert is_about(bucket, "bucket 64x64", "12 -> 17 records") and bucket.count("12 -> 17") == 2
    repeated = WholePlan(tables(items_of([12, 5]), (2,)), 1, 4)
    said = changes(kept, repeated.describe())
    assert any(is_about(line, "bucket 96x32", "5 -> 5 records", "5 -> 10") for line in said)


def test_plans_travel_to_workers(tables):
    plan = WholePlan(tables(items_of([12, 5])), 1, 4)
    expected = [plan.batch(s) for s in range(9)]
    assert [pickle.loads(pickle.dumps(plan)).batch(s) for s in range(9)] == expected


def test_held_out_records_are_stable_and_never_trained_on(tables):
    few, more = items_of([300, 100]), items_of([300, 100]) + items_of([300, 100], prefix="b")
    split = HeldOutSplit(0.2, 11)
    a, b = tables(few, (3,), split=split), tables(more, (3,), split=split)
    held = [validation_keys(t) for t in (a, b)]
    assert 0.14 < len(held[0]) / 400 < 0.26
    assert held[0] == {key for key in held[1] if key in {item.key for item in few}}
    assert held[0] != validation_keys(tables(few, split=HeldOutSplit(0.2, 12)))
    assert held[0] < validation_keys(tables(few, split=HeldOutSplit(0.3, 11)))  # a larger share only adds
    trained = {d.key for _, draws in all_draws(WholePlan(a, 1, 4), 2) for d in draws}
    assert trained == {item.key for item in few} - held[0]
    assert all(rows.uses == rows.records for rows in a.validation)  # repeats are for training


def validation_keys(tables):
    keys = []
    for rows in tables.validation:
        keys += tables.take(np.arange(rows.first, rows.first + rows.records))[1]
    assert len(keys) == len(set(keys))
    return set(keys)


def test_records_that_fit_no_bucket_are_the_last_rows(tables):
    items = [*items_of([8, 5]), *(Item(f"thin{i}", Bucket(0, 0)) for i in range(3))]
    made = tables(items, split=HeldOutSplit(0.3, 1))
    assert made.unplaced == 3 and made.count == 16
    ids, keys = made.take(np.arange(13, 16))
    assert {by_id(items)[i].name for i in ids} == {"thin0", "thin1", "thin2"}
    planned = {d.key for _, draws in all_draws(WholePlan(made, 1, 2), 4) for d in draws}
    assert len(planned) + len(validation_keys(made)) == 13 and not planned & set(keys)


def test_rows_outside_a_table_are_refused(tables):
    with pytest.raises(IndexError, match="5 entries"):
        tables(items_of([5])).take(np.array([5]))


def test_nothing_left_to_train_on_is_said(tables):
    with pytest.raises(DataFault, match="validation_split"):
        WholePlan(tables(items_of([5]), split=HeldOutSplit(0.9999999999, 1)), 1, 4)


def test_damaged_tables_are_named(tables):
    made = tables(items_of([5]))
    whole = (made.folder / "ids.npy").read_bytes()
    for torn in (b"torn", whole[:-1], b""):
        (made.folder / "ids.npy").write_bytes(torn)
        with pytest.raises(DataFault, match=re.escape(str(made.folder))):
            pickle.loads(pickle.dumps(made))


def test_an_epoch_can_begin_at_any_step_of_a_run(tables):
    items = items_of([13, 9])
    plain, moved = WholePlan(tables(items), 7, 4), WholePlan(tables(items), 7, 4)
    for _ in range(2):  # a second time at the same step changes nothing
        moved.begin_epoch_at(2, 8)
        assert plain.total_steps(2) == 10 and moved.offset == 2
        assert moved.locate(8) == (2, 0) and moved.total_steps(2) == 8 and moved.digest == plain.digest
    assert [moved.batch(step) for step in range(8, 20)] == [plain.batch(step) for step in range(10, 22)]
    with pytest.raises(IndexError):
        moved.locate(-3)
