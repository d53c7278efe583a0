"""Several data sets in one run: plans, micro batches, what is held out, and how often regularisation pictures are used."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Bucket, DataFault, DrawSpec, FeatureSpec
from difftrain.data.evaluation_sets import held_out_set
from difftrain.data.loader import make_loader
from difftrain.data.plan.plan import changes
from difftrain.data.plan.table_build import HeldOutSplit, PlanSource, reg_uses
from difftrain.data.plan.whole import WholePlan
from difftrain.data.prepare import Data, global_batches, make_plan, open_data, prepare
from difftrain.testing.pictures import write_folder, write_tar
from difftrain.testing.tables import Item, by_id, make_tables

SIZES = (Bucket(64, 64), Bucket(32, 96), Bucket(96, 32))
FEATURES = FeatureSpec({}, {"noise": DrawSpec("normal", channels=4, factor=8)})


def items_of(counts: tuple[int, ...], source: int = 0, prefix: str = "a", shards: int = 1) -> list[Item]:
    return [
        Item(f"{prefix}/{b}/{i}", SIZES[b], source=source, shard=i % shards)
        for b, count in enumerate(counts)
        for i in range(count)
    ]


# ---- plans


@pytest.mark.parametrize(
    ("layout", "order", "digest", "draws"),
    [
        ("key", "random", "4b5623c54e4ce8965246624b2898f4a3", "f5b1698adbddbf69"),
        ("shard", "sequential", "7afa80ac5cae889c0e4030ef7bc6ba18", "19aa5739efa42e1b"),
    ],
)
def test_the_plan_of_one_data_set_is_what_it_always_was(
    tmp_path: Path, layout: Any, order: str, digest: str, draws: str
) -> None:
    items = [
        Item(f"a/{b}/{i}", SIZES[b], source=i % 2, shard=i // 5) for b, c in enumerate((23, 11, 3)) for i in range(c)
    ]
    plan = WholePlan(
        make_tables(tmp_path / "t", items, (1, 3), split=HeldOutSplit(0.2, 5), layout=layout),
        7,
        4,
        order,
        streams=2,
        window=2,
    )
    state = hashlib.blake2b(digest_size=8)
    for step in range(60):
        bucket, found = plan.batch(step)
        state.update(repr((tuple(bucket), [(draw.key, draw.occurrence) for draw in found])).encode())
    assert (plan.digest, state.hexdigest()) == (digest, draws)  # from before there were several


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 9)), min_size=2, max_size=3),
    batches=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    repeats=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    order=st.sampled_from(["random", "sequential"]),
)
def test_every_use_comes_once_a_pass_in_batches_of_its_data_set(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[tuple[int, int]],
    batches: list[int],
    repeats: list[int],
    order: str,
) -> None:
    items = [item for n, each in enumerate(counts) for item in items_of(each, n, f"s{n}", shards=3)]
    origins = [PlanSource(repeats[n], n) for n in range(len(counts))]
    layout: Any = "key" if order == "random" else "shard"
    tables = make_tables(tmp_path_factory.mktemp("t") / "t", items, origins, layout=layout)
    sizes = batches[: len(counts)]
    plan = WholePlan(tables, 11, sizes, order, streams=3, window=2)
    epochs = int(np.lcm.reduce(sizes))
    seen: dict[bytes, list[int]] = {}
    known = by_id(items)
    steps = plan.total_steps(epochs)
    for step in range(steps):
        bucket, draws = plan.batch(step)
        dataset = plan.group(step)
        assert len(draws) == plan.size(step) == sizes[dataset]
        for draw in draws:
            assert (known[draw.record_id].bucket, known[draw.record_id].source) == (bucket, dataset)
            seen.setdefault(draw.key, []).append(draw.occurrence)
        epoch, index = plan.locate(step)
        assert plan.total_steps(epoch) + index == step < plan.total_steps(epoch + 1)
    expected = {item.key: list(range(repeats[item.source] * epochs)) for item in items}
    assert {key: sorted(found) for key, found in seen.items()} == expected
    assert plan.mean_batch * steps == pytest.approx(sum(map(len, seen.values())))


def test_another_data_set_reshuffles_nothing(tmp_path: Path) -> None:
    first = items_of((20, 9))
    alone = WholePlan(make_tables(tmp_path / "a", first), 3, 4)
    both = WholePlan(
        make_tables(tmp_path / "b", [*first, *items_of((20, 9), 1, "b")], [PlanSource(1, 0), PlanSource(1, 1)]),
        3,
        (4, 4),
    )

    def streams(plan: WholePlan, dataset: int) -> dict[Bucket, list[Any]]:
        found: dict[Bucket, dict[int, Any]] = {}
        for step in range(plan.total_steps(8)):
            epoch, index = plan.locate(step)
            served = plan.served(epoch)
            which, k = plan.arrangement.pick(epoch, index, plan.served(epoch + 1) - served)
            if plan.buckets[which].dataset == dataset:
                draws = [(draw.key, draw.occurrence) for draw in plan.batch(step)[1]]
                found.setdefault(plan.buckets[which].bucket, {})[int(served[which]) + k] = draws
        return {bucket: [batches[n] for n in sorted(batches)] for bucket, batches in found.items()}

    assert streams(alone, 0) == streams(both, 0)
    # by rank among the keys of the bucket: what a permutation decides
    keys = [sorted(item.key for item in items_of((20,), prefix=prefix)) for prefix in "ab"]
    places = [{key: n for n, key in enumerate(each)} for each in keys]
    orders = [[places[n][key] for batch in streams(both, n)[SIZES[0]] for key, _ in batch] for n in range(2)]
    assert orders[0] != orders[1], "equal buckets of two data sets are shuffled apart"


def test_what_a_plan_says_names_the_data_set(tmp_path: Path) -> None:
    items = [*items_of((20,)), *items_of((3,), 1, "b")]
    plan = WholePlan(make_tables(tmp_path / "a", items, [PlanSource(1, 0), PlanSource(2, 1)]), 3, (4, 8))
    said = plan.lines()
    assert "global batch 4, 8" in said[0]
    assert re.match(r"bucket 64x64 .*data set 2 ", said[1]) and refusals.names(said[1], 6, 8)
    other = WholePlan(make_tables(tmp_path / "b", items, [PlanSource(1, 0), PlanSource(1, 1)]), 3, (4, 8))
    [line] = changes(json.loads(json.dumps(plan.describe())), other.describe())
    bucket, _, counts = line.partition(": ")
    assert refusals.names(bucket, "64x64", 2) and refusals.names(counts, "3 -> 3 records", "6 -> 3")


# ---- regularisation pictures


def kohyas_loop(repeats: list[int], draws: int) -> list[int]:
    """Count uses as the loop of kohya's DreamBoothDataset does."""
    used, n, first = [0] * len(repeats), 0, True
    while n < draws:
        for i, own in enumerate(repeats):
            more = own if first else 1
            used[i], n = used[i] + more, n + more
            if n >= draws:
                break
        first = False
    return used


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 90))
def test_regularisation_pictures_are_used_as_in_kohyas_loop(repeats: list[int], draws: int) -> None:
    assert reg_uses(np.array(repeats), draws).tolist() == kohyas_loop(repeats, draws)


@pytest.mark.parametrize(("count", "surplus"), [(3, 0), (8, 0), (11, 3)])
@pytest.mark.parametrize("layout", ["key", "shard"])
def test_regularisation_is_half_of_the_draws_in_the_order_of_keys(
    tmp_path: Path, count: int, surplus: int, layout: Any
) -> None:
    items = [*items_of((4,)), *items_of((count,), 1, "r"), *items_of((5,), 2, "other")]
    origins = [PlanSource(2, 0), PlanSource(1, 0, True), PlanSource(1, 1)]
    tables = make_tables(tmp_path / "t", items, origins, layout=layout)
    assert (tables.reg_uses, tables.surplus, tables.unplaced) == (8, surplus, 0)
    plan = WholePlan(tables, 1, (4, 1), "random" if layout == "key" else "sequential")
    uses = Counter(draw.key for step in range(plan.total_steps(1)) for draw in plan.batch(step)[1])
    ordered = sorted(item.key for item in items if item.source == 1)
    assert [uses[key] for key in ordered] == kohyas_loop([1] * count, 8)
    assert all(uses[item.key] == (2 if item.source == 0 else 1) for item in items if item.source != 1)


# ---- pictures


def tokenize(captions: list[str]) -> dict[str, torch.Tensor]:
    rows = [list(text.encode()[:40].ljust(40)) for text in captions]
    return {"ids": torch.tensor(rows, dtype=torch.int64)}


def captions_in(batch: Batch) -> list[str]:
    return [bytes(row.tolist()).decode().rstrip() for row in batch.features["ids"]]


@pytest.fixture
def sets(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Two data sets of the same folder at two sizes, the first with regularisation pictures, the second flipped."""
    train = write_folder(tmp_path / "train", [(64, 64), (96, 48), (48, 96), (80, 80), (70, 50), (64, 60)] * 3)
    reg = write_folder(tmp_path / "reg", [(64, 64), (90, 60)], start=100)
    (reg / "0100.txt").unlink()

    def make(**sections: Any) -> TrainConfig:
        size = {"enable_bucket": True, "min_bucket_reso": 32, "max_bucket_reso": 128, "bucket_reso_steps": 32}
        share = {"validation_split": sections.get("validation", {}).get("split", 0.0)}
        first = [
            {"image_dir": str(train), "flat": True, "repeats": 2, "captions": {"prefix": "first"}},
            {"image_dir": str(reg), "flat": True, "is_reg": True, "class_tokens": "a thing"},
        ]
        second = [{"image_dir": str(train), "flat": True, "flip": True, "resize_interpolation": "nearest"}]
        datasets = [
            {"resolution": (64, 64), "batch_size": 3, "subsets": first} | size | share,
            {"resolution": (96, 96), "batch_size": 2, "subsets": second} | size | share,
        ]
        data = {"datasets": datasets, "workers": 0, "cache_dir": str(tmp_path / "cache")} | sections.pop("data", {})
        training = {"accumulation": 2, "seed": 1} | sections.pop("training", {})
        return TrainConfig.model_validate({"data": data, "training": training} | sections)

    return make


def opened(cfg: TrainConfig) -> Data:
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def micro_batches(
    cfg: TrainConfig, data: Data, dp_rank: int = 0, dp_size: int = 1, last: int = 30
) -> list[list[Batch]]:
    plan = make_plan(data, cfg, global_batches(cfg, dp_size))
    place = {"dp_rank": dp_rank, "dp_size": dp_size, "first_step": 0, "last_step": last}
    return list(make_loader(data, plan, FEATURES, tokenize, cfg, **place))


def samples_in(batch: Batch) -> list[tuple[Any, ...]]:
    pixels, noise = batch.features["pixels"], batch.draws["noise"]
    return [
        (key, int(batch.occurrence[i]), pixels[i].numpy().tobytes(), noise[i].numpy().tobytes())
        for i, key in enumerate(batch.keys)
    ]


@pytest.mark.flags("reg_data_dir", "prior_loss_weight", "dataset_config")
def test_each_data_set_has_its_own_sizes_batches_recipes_and_weights(sets: Callable[..., TrainConfig]) -> None:
    cfg = sets(loss={"prior_weight": 0.25})
    data = opened(cfg)
    seen: Counter[tuple[int, float]] = Counter()
    for micro in micro_batches(cfg, data):
        sources = {data.index.sources[r.media.source] for b in micro for r in data.index.records(b.record_id.tolist())}
        [dataset] = {source.dataset for source in sources}
        assert all(len(batch.keys) == (3, 2)[dataset] for batch in micro) and len(micro) == 2
        area = (64 * 64, 96 * 96)[dataset]
        assert all(area / 2 <= batch.bucket.height * batch.bucket.width <= area for batch in micro)
        for batch in micro:
            for record_id, caption, weight in zip(
                batch.record_id.tolist(), captions_in(batch), batch.features["loss_weight"].tolist(), strict=True
            ):
                record = data.index.record(record_id)
                is_reg = data.index.sources[record.media.source].is_reg
                assert weight == (0.25 if is_reg else 1.0)
                assert caption.startswith("first picture") == (dataset == 0 and not is_reg)
                assert (caption == "a thing") == record.name.endswith("0100.png")
                seen[dataset, weight] += 1
    assert min(seen.values()) > 5 and set(seen) == {(0, 0.25), (0, 1.0), (1, 1.0)}


def test_without_weights_batches_carry_none(sets: Callable[..., TrainConfig]) -> None:
    cfg = sets()
    assert all(
        "loss_weight" not in batch.features for micro in micro_batches(cfg, opened(cfg), last=6) for batch in micro
    )


@pytest.mark.parametrize(("accumulation", "dp_size"), [(1, 2), (1, 1)])
def test_any_split_of_a_step_sees_the_same_samples(
    sets: Callable[..., TrainConfig], accumulation: int, dp_size: int
) -> None:
    cfg, data = sets(), opened(sets())
    whole = micro_batches(cfg, data, last=12)
    scale = 2 // (accumulation * dp_size)
    larger = tuple(each.model_copy(update={"batch_size": each.batch_size * scale}) for each in cfg.data.datasets)
    split = cfg.model_copy(
        update={
            "data": cfg.data.model_copy(update={"datasets": larger}),
            "training": cfg.training.model_copy(update={"accumulation": accumulation}),
        }
    )
    ranks = [micro_batches(split, data, rank, dp_size, last=12) for rank in range(dp_size)]
    for step, micro in enumerate(whole):
        together = [sample for rank in ranks for batch in rank[step] for sample in samples_in(batch)]
        assert sorted(together) == sorted(sample for batch in micro for sample in samples_in(batch))


def names(data: Data, parts: Any) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {0: set(), 1: set()}
    for rows in parts:
        ids, _ = data.tables.take(np.arange(rows.first, rows.first + rows.records))
        for record in data.index.records(ids):
            source = data.index.sources[record.media.source]
            if not source.is_reg:
                found[source.dataset].add(record.media.path)
    return found


def test_a_picture_is_held_out_of_all_data_sets_or_of_none(sets: Callable[..., TrainConfig]) -> None:
    for seed in range(2):
        cfg = sets(validation={"split": 0.4, "seed": seed})
        data = opened(cfg)
        held, trained = names(data, data.tables.validation), names(data, data.tables.training)
        assert held[0] == held[1] and 2 <= len(held[0]) <= 14
        assert trained[0] == trained[1] and not held[0] & trained[0] and len(held[0] | trained[0]) == 18
        regs = [s for s in data.index.sources if s.is_reg]
        assert data.tables.reg_uses == 2 * len(trained[0]) and len(regs) == 1
        seen = list(held_out_set(cfg, data).batches(tokenize, FEATURES))
        assert sum(len(batch.keys) for batch in seen) == 2 * len(held[0])
        assert all("loss_weight" not in batch.features and len(batch.keys) <= 3 for batch in seen)


def test_the_largest_share_counts_for_a_folder_in_two_data_sets(sets: Callable[..., TrainConfig]) -> None:
    cfg = sets(validation={"split": 0.4, "seed": 2})
    first, second = cfg.data.datasets
    shares = (first, second.model_copy(update={"validation_split": 0.0}))
    data = opened(cfg.model_copy(update={"data": cfg.data.model_copy(update={"datasets": shares})}))
    whole = opened(cfg)
    assert names(data, data.tables.validation) == names(whole, whole.tables.validation)


def test_folders_inside_one_another_are_one_lot_too(tmp_path: Path) -> None:
    outer = tmp_path / "data"
    write_folder(outer / "sub", [(64, 64)] * 20)
    write_tar(outer / "tars" / "0.tar", [(64, 64)] * 9, start=50)
    share = {"validation": {"split": 0.5, "seed": 1}, "training": {"seed": 1}}

    def held(*dirs: str) -> list[set[str]]:
        data = {"dirs": dirs, "resolution": (64, 64), "workers": 0, "cache_dir": str(tmp_path / "cache")}
        found = opened(TrainConfig.model_validate({"data": data} | share))
        records: dict[int, set[str]] = {}
        for rows in found.tables.validation:
            for record in found.index.records(range(found.index.count)):
                ids, _ = found.tables.take(np.arange(rows.first, rows.first + rows.records))
                if record.id in ids:
                    records.setdefault(record.media.source, set()).add(record.name.rpartition("/")[2].split("!")[-1])
        return [records[source] for source in sorted(records)]

    sub, again = held(str(outer / "sub"), str(outer / "sub" / ".." / "sub"))
    assert sub == again and 3 <= len(sub) <= 17
    tars, one = held(str(outer / "tars"), str(outer / "tars" / "0.tar"))
    assert tars == one and 1 <= len(tars) <= 8


def test_a_sub_folder_is_not_part_of_an_image_dir(tmp_path: Path) -> None:
    write_folder(tmp_path / "top", [(64, 64)] * 3)
    write_folder(tmp_path / "top" / "below", [(64, 64)] * 4)
    subset = {"image_dir": str(tmp_path / "top"), "flat": True}
    data = {"datasets": [{"resolution": (64, 64), "subsets": [subset]}], "cache_dir": str(tmp_path / "cache")}
    cfg = TrainConfig.model_validate({"data": data, "training": {"seed": 1}})
    assert opened(cfg).index.count == 3
    inner = cfg.data.datasets[0].subsets[0].model_copy(update={"image_dir": str(tmp_path)})
    only = cfg.data.datasets[0].model_copy(update={"subsets": (inner,)})
    with pytest.raises(DataFault, match=r"no .*folder itself"):
        opened(cfg.model_copy(update={"data": cfg.data.model_copy(update={"datasets": (only,)})}))


def test_surplus_is_said(tmp_path: Path) -> None:
    train, reg = write_folder(tmp_path / "t", [(64, 64)] * 2), write_folder(tmp_path / "r" / "2_dog", [(64, 64)] * 3)
    data = {
        "dirs": (str(train),),
        "reg_dirs": (str(reg.parent),),
        "resolution": (64, 64),
        "cache_dir": str(tmp_path / "cache"),
    }
    said: list[str] = []
    prepare(TrainConfig.model_validate({"data": data, "training": {"seed": 1}}), log=said.append)
    assert any(line.startswith("data: 2 regularisation ") for line in said)
    assert any(line.startswith("data: ") and refusals.names(line, "3 records", 4) for line in said)
