"""Tars in sequence: exact passes, close together in the shards, streams that belong to ranks."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftrain.contracts import Bucket
from difftrain.data.plan.sequential import merged
from difftrain.data.plan.whole import WholePlan
from difftrain.testing.tables import Item, by_id, make_tables

SIZES = (Bucket(64, 64), Bucket(32, 96), Bucket(96, 32))


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=12),
    repeats=st.integers(1, 3),
    batch=st.integers(1, 12),
    streams=st.integers(1, 16),
    window=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_every_use_comes_exactly_once_a_pass(tmp_path_factory, shards, repeats, batch, streams, window, seed):
    items = [
        Item(f"{s}/{b}/{i}", SIZES[b], shard=s)
        for s, counts in enumerate(shards)
        for b, count in enumerate(counts)
        for i in range(count)
    ] + [Item(f"plain{i}", SIZES[0], source=1) for i in range(5)]  # a folder beside the tars
    tables = make_tables(tmp_path_factory.mktemp("t") / "t", items, (repeats, 1), layout="shard")
    plan = WholePlan(tables, seed, batch, "sequential", streams=streams, window=window)
    seen = {}
    for step in range(plan.total_steps(batch)):
        bucket, draws = plan.batch(step)
        assert len(draws) == batch
        for draw in draws:
            assert by_id(items)[draw.record_id].bucket == bucket
            seen.setdefault(draw.key, []).append(draw.occurrence)
    expected = {item.key: list(range(batch * (1 if item.source else repeats))) for item in items}
    assert {key: sorted(occurrences) for key, occurrences in seen.items()} == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 25), min_size=1, max_size=6).filter(any))
def test_merge_is_a_sort_by_share(counts):
    expected = sorted((Fraction(2 * k + 1, 2 * count), b, k) for b, count in enumerate(counts) for k in range(count))
    assert [merged(i, np.array(counts)) for i in range(len(expected))] == [(b, k) for _, b, k in expected]


def test_merge_of_millions_is_exact_where_it_can_be_checked():
    counts = np.array([1_000_000, 10, 333_333, 1])
    total = int(counts.sum())
    assert merged(0, counts) == (0, 0)
    assert merged(total - 1, counts) == (0, 999_999)
    for index in (1, 12_345, 600_001, total // 2, total // 2 + 1, total - 2):
        b, k = merged(index, counts)
        share = Fraction(2 * k + 1, 2 * int(counts[b]))
        before = 0
        for other, count in enumerate(counts.tolist()):
            j = int(share * count - Fraction(1, 2)) + 2  # first j that cannot come before, or a little later
            while j > 0 and not (j - 1 < count and (Fraction(2 * j - 1, 2 * count), other) < (share, b)):
                j -= 1
            before += j
        assert before == index


@pytest.fixture
def tars(tmp_path):
    """Two buckets over 32 tars of 40 pictures."""
    return make_tables(tmp_path / "t", TARS, layout="shard")


TARS = [Item(f"{s}/{i}", SIZES[i % 4 == 0], shard=s) for s in range(32) for i in range(40)]
TARS_BY_ID = by_id(TARS)


def shards_of(draws):
    return [TARS_BY_ID[d.record_id].shard for d in draws]


def test_a_stream_reads_one_window_of_shards_at_a_time(tars):
    plan = WholePlan(tars, 5, 8, "sequential", streams=4, window=2)
    for stream in range(4):
        visited = []  # shards in order of first use, over all buckets
        recent = []
        for step in range(plan.steps(0)):
            _, draws = plan.batch(step)
            own = shards_of(draws[stream::4])
            recent = (recent + own)[-16:]
            visited += [s for s in own if s not in visited]
        # A quarter of an epoch is 8 shards and the edges of its windows, not all 32.
        assert 8 <= len(visited) <= 13, visited
        assert len(set(recent)) <= 6


def test_rank_reads_its_own_streams(tars):
    plan = WholePlan(tars, 5, 16, "sequential", streams=8, window=2)
    assert plan.arrangement.streams == 8
    per_rank = [set(), set(), set(), set()]
    for step in range(plan.steps(0)):
        for rank in range(4):
            per_rank[rank] |= set(shards_of(plan.batch(step, slice(rank, None, 4))[1]))
    # A rank has 2 of 8 streams, each 4 shards and the two windows that its ends cut.
    assert all(len(shards) <= 2 * 8 for shards in per_rank)
    assert set.union(*per_rank) == set(range(32))


def test_streams_divide_the_batch(tars):
    assert WholePlan(tars, 1, 96, "sequential", streams=64).arrangement.streams == 48
    assert WholePlan(tars, 1, 7, "sequential", streams=64).arrangement.streams == 7
    assert WholePlan(tars, 1, 13, "sequential", streams=12).arrangement.streams == 1


def test_all_buckets_pass_the_shards_together(tars):
    plan = WholePlan(tars, 5, 4, "sequential", streams=1, window=1)
    places = {rows.bucket: [] for rows in plan.buckets}
    rank = {shard: place for place, shard in enumerate(plan.arrangement.shard_order(0).tolist())}
    for step in range(plan.steps(0)):
        bucket, draws = plan.batch(step)
        for other in places.values():
            other.append(other[-1] if other else 0)
        places[bucket][-1] = rank[shards_of(draws)[0]]
    apart = np.abs(np.subtract(*places.values()))
    assert apart.max() <= 2


def test_passes_differ_and_windows_are_shuffled(tars):
    plan = WholePlan(tars, 5, 8, "sequential", streams=4, window=2)
    first, second = ([plan.batch(s + e * plan.steps(0)) for s in range(20)] for e in (0, 1))
    assert [d.key for _, draws in first for d in draws] != [d.key for _, draws in second for d in draws]
    one_stream = [TARS_BY_ID[draws[0].record_id] for bucket, draws in first if bucket == SIZES[0]]
    keys = [item.key for item in one_stream]
    assert keys != sorted(keys)
    assert len({item.shard for item in one_stream[:6]}) == 2  # a window mixes its shards


def test_layouts_cannot_be_mixed_up(tars):
    with pytest.raises(ValueError, match="shard"):
        WholePlan(tars, 5, 8, "random")


def test_sequential_settings_are_in_the_digest(tars):
    digests = {WholePlan(tars, 5, 8, "sequential", streams=s, window=w).digest for s, w in ((4, 2), (4, 3), (2, 2))}
    assert len(digests) == 3
