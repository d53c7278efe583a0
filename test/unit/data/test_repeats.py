"""Repeats that are fractions: exact over epochs, in closed form, and whole ones as ever."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from difftrain.contracts import Bucket
from difftrain.data.plan.sequential import BucketRepeats
from difftrain.data.plan.table_build import HeldOutSplit, PlanSource
from difftrain.data.plan.whole import WholePlan
from difftrain.data.sources.configured import repeats as whole_or_not
from difftrain.testing.tables import Item, make_tables

SIZES = (Bucket(64, 64), Bucket(32, 96))
FRACTIONS = st.fractions(Fraction(1, 12), Fraction(4), max_denominator=12)


def items_of(counts, sources, shards=1):
    return [
        Item(f"{b}/{i}", SIZES[b], source=sources[i % len(sources)], shard=i % shards)
        for b, count in enumerate(counts)
        for i in range(count)
    ]


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 19), min_size=1, max_size=2),
    repeats=st.lists(FRACTIONS, min_size=1, max_size=3),
    batch=st.integers(1, 7),
    seed=st.integers(0, 2**40),
    order=st.sampled_from(("random", "sequential")),
)
def test_over_epochs_every_record_comes_exactly_as_often_as_asked(
    tmp_path_factory, counts, repeats, batch, seed, order
):
    items = items_of(counts, range(len(repeats)), shards=3)
    layout = "key" if order == "random" else "shard"
    folder = tmp_path_factory.mktemp("t") / "t"
    tables = make_tables(folder, items, [float(each) for each in repeats], layout=layout)
    plan = WholePlan(tables, seed, batch, order, streams=4, window=2)
    cycle = math.lcm(*(each.denominator for each in repeats)) * batch  # of every bucket whole passes and whole batches
    assume(cycle <= 60)
    seen = {}
    for step in range(plan.total_steps(cycle)):
        _, draws = plan.batch(step)
        assert len(draws) == batch
        for draw in draws:
            seen.setdefault(draw.key, []).append(draw.occurrence)
    wanted = {item.key: repeats[item.source] * cycle for item in items}
    assert {key: len(found) for key, found in seen.items()} == wanted
    assert all(sorted(found) == list(range(len(found))) for found in seen.values())


@pytest.mark.parametrize("layout", ["key", "shard"])
@pytest.mark.parametrize("fraction", [0.5, 0.3, 1.5, 2.75, 0.01])
def test_in_every_pass_a_record_comes_as_often_as_its_repeats_rounded_down_or_up(tmp_path, fraction, layout):
    items = items_of([37], [0], shards=5)
    (rows,) = make_tables(tmp_path / "t", items, [fraction], layout=layout).training
    passes, total = BucketRepeats(rows), Counter()
    for number in range(40):
        uses = np.arange(passes.uses(number))
        found, occurrences = passes.segments.find(number, uses)
        counts = Counter(found.tolist())
        assert set(counts.values()) <= {math.floor(fraction), math.ceil(fraction)}
        for row, occurrence in zip(found.tolist(), occurrences.tolist(), strict=True):
            assert occurrence >= total[row]
        total.update(counts)
        assert abs(passes.before(number + 1) - 37 * fraction * (number + 1)) <= passes.fractional
    spread = max(total.values()) - min(total[row] for row in range(rows.first, rows.first + 37))
    assert spread <= 1


@settings(max_examples=60, deadline=None)
@given(repeats=st.lists(FRACTIONS, min_size=1, max_size=3), place=st.integers(0, 5000))
def test_the_pass_of_a_place_is_found_without_walking_there(tmp_path_factory, repeats, place):
    items = items_of([23], range(len(repeats)), shards=4)
    folder = tmp_path_factory.mktemp("t") / "t"
    (rows,) = make_tables(folder, items, [float(each) for each in repeats], layout="shard").training
    passes = BucketRepeats(rows)
    which = passes.pass_of(place)
    assert passes.before(which) <= place < passes.before(which + 1)
    starts = [0]
    while starts[-1] <= place + 50:
        starts.append(passes.before(len(starts)))
    found, offsets = passes.split(np.arange(place, place + 50))
    assert [starts[t] + o for t, o in zip(found, offsets, strict=True)] == list(range(place, place + 50))


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_any_step_is_the_same_however_it_is_reached(tmp_path, order):
    items = items_of([20, 9], [0, 1], shards=4)
    tables = make_tables(tmp_path / "t", items, [0.6, 1.25], layout="key" if order == "random" else "shard")
    plan = WholePlan(tables, 3, 4, order, streams=2, window=2)
    walked = [plan.batch(step) for step in range(60)]
    for step in (59, 17, 0, 33):
        fresh = WholePlan(tables, 3, 4, order, streams=2, window=2)
        assert fresh.batch(step) == walked[step]
    for epoch in range(12):
        first = plan.total_steps(epoch)
        assert plan.locate(first) == (next(e for e in range(epoch, 99) if plan.steps(e)), 0) or plan.steps(epoch) == 0
    assert plan.uses == pytest.approx(sum(r.uses for r in tables.training))


def test_whole_repeats_written_as_fractions_are_whole_ones(tmp_path):
    items = items_of([12, 5], [0, 1])
    whole = WholePlan(make_tables(tmp_path / "a", items, [2, 3]), 1, 4)
    again = WholePlan(make_tables(tmp_path / "b", items, [2.0, 3.0]), 1, 4)
    half = WholePlan(make_tables(tmp_path / "c", items, [2.5, 3]), 1, 4)
    assert whole.digest == again.digest != half.digest
    assert [whole.batch(k) for k in range(30)] == [again.batch(k) for k in range(30)]


def test_the_digests_of_whole_repeats_are_those_of_before(tmp_path):
    plan = WholePlan(make_tables(tmp_path / "a", items_of([12, 5], [0, 1]), [2, 3]), 1, 4)
    assert plan.digest == "58224ee50c47ce25c25a7ce97be23d2b"


def test_another_bucket_more_moves_no_extra_use(tmp_path):
    few = make_tables(tmp_path / "a", items_of([12], [0]), [0.5])
    more = make_tables(tmp_path / "b", items_of([12, 7], [0]), [0.5])
    (one,), two = few.training, next(rows for rows in more.training if rows.bucket == SIZES[0])
    for number in range(4):
        uses = np.arange(BucketRepeats(one).uses(number))
        a, b = BucketRepeats(one).segments.find(number, uses), BucketRepeats(two).segments.find(number, uses)
        assert (a[0] - one.first).tolist() == (b[0] - two.first).tolist()


def test_a_share_of_the_records_is_always_the_same_ones(tmp_path):
    items = items_of([400], [0, 1])
    tables = make_tables(tmp_path / "a", items, [PlanSource(1, share=0.25), PlanSource(2)])
    (rows,) = tables.training
    assert 200 + 30 < rows.records < 200 + 75 and tables.left_out == 400 - rows.records
    fewer = make_tables(tmp_path / "b", items[:200], [PlanSource(1, share=0.25), PlanSource(2)])
    kept = {key for key in tables.take(np.arange(rows.first, rows.first + rows.records))[1]}
    of_fewer = fewer.training[0]
    found = set(fewer.take(np.arange(of_fewer.first, of_fewer.first + of_fewer.records))[1])
    assert found == kept & {item.key for item in items[:200]}


def test_held_out_records_serve_once_whatever_the_repeats(tmp_path):
    tables = make_tables(tmp_path / "a", items_of([200], [0]), [0.5], split=HeldOutSplit(0.3, 1))
    (held,) = tables.validation
    assert held.uses == held.records and not held.segments["extra"].any()


@pytest.mark.parametrize(
    ("given", "times", "wanted"), [(0.1, 3, 0.3), (2.0, 1, 2), (0.5, 4, 2), (3, 5, 15), (1.5, 1, 1.5)]
)
def test_repeats_of_folders_are_multiplied_exactly(given, times, wanted):
    assert whole_or_not(given, times) == wanted and type(whole_or_not(given, times)) is type(wanted)
