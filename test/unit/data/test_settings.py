"""Settings of reading and caching that only some runs have: what is kept ready, what encodes, shards of plain files."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from difftrain.cache.build import encoding_device
from difftrain.config import TrainConfig
from difftrain.config.rules.data import data_companions, sizes
from difftrain.contracts import ConfigFault
from difftrain.data.loader import data_loader
from difftrain.data.plan.buckets import BucketTable
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(sections)


def test_micro_batches_that_a_worker_keeps_ready() -> None:
    loaders = [data_loader([0], range(1), 1, ahead=ahead) for ahead in (None, 5)]  # type: ignore[arg-type]
    assert [each.prefetch_factor for each in loaders] == [2, 5]
    assert data_loader([0], range(1), 0, ahead=5).prefetch_factor is None  # type: ignore[arg-type]


def test_what_encodes_may_be_another_device_than_what_trains() -> None:
    cpu = choose("cpu")
    assert encoding_device(config(), cpu, Ranks()) is cpu
    assert encoding_device(config(cache={"device": "cpu"}), cpu, Ranks()) is cpu
    with pytest.raises(ConfigFault, match=r"--cache\.device.*'quantum'"):
        encoding_device(config(cache={"device": "quantum"}), cpu, Ranks())


@pytest.mark.parametrize(("order", "notes"), [("random", 1), ("sequential", 0)])
def test_shards_of_plain_files_mean_something_in_sequence_only(order: str, notes: int) -> None:
    cfg = config(data={"shard_size": 100, "tar_order": order})
    found = list(data_companions(cfg, {"data.shard_size"}))
    assert len(found) == notes and all(each.note for each in found)


def test_listed_buckets_must_fit_the_vae() -> None:
    (found,) = sizes(config(data={"sizes": ((64, 60), (64, 64))}), set())
    assert re.search("multiples of 32, got 64,60", found.what)


def test_the_nearest_of_listed_buckets_is_that_in_log_space() -> None:
    table = BucketTable.of(config(data={"sizes": ((64, 256), (64, 64), (256, 64))}).data)
    # from 1 : 4 to 1 : 1 the middle is 1 : 2 in log space, 1 : 1.6 by difference
    assert [table.select((100, high)).bucket.height for high in (199, 201)] == [64, 256]
    assert [table.select((wide, 100)).bucket.width for wide in (199, 201)] == [64, 256]
    fit = table.select((100, 300))
    assert fit.resized_wh == (85, 256) and fit.crop == (10, 0)


@given(
    listed=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8, unique=True),
    pictures=st.lists(st.tuples(st.integers(16, 3000), st.integers(16, 3000)), min_size=1, max_size=30),
)
def test_many_pictures_go_where_each_alone_would(
    listed: list[tuple[int, int]], pictures: list[tuple[int, int]]
) -> None:
    table = BucketTable.of(config(data={"sizes": tuple((8 * w, 8 * h) for w, h in listed)}).data)
    buckets, places = table.select_many(*np.array(pictures).T)
    for picture, place in zip(pictures, places.tolist(), strict=True):
        fit = table.select(picture)
        assert fit.bucket == buckets[place]
        assert fit.resized_wh[0] >= fit.bucket.width and fit.resized_wh[1] >= fit.bucket.height
        ratio = math.log(picture[0] / picture[1])
        best = min(abs(math.log(w / h) - ratio) for w, h in listed)
        assert abs(math.log(fit.bucket.width / fit.bucket.height) - ratio) <= best + 1e-9
