"""Validation: every held-out record once, the same draws every time, on any number of ranks."""

from collections import Counter

import pytest
import torch

from difftrain.config import TrainConfig
from difftrain.contracts import DrawSpec, FeatureSpec
from difftrain.data.evaluation_sets import held_out_set
from difftrain.data.prepare import make_plan, open_data, prepare
from difftrain.testing.pictures import write_folder

FEATURES = FeatureSpec(
    {}, {"noise": DrawSpec("normal", channels=4, factor=8), "timestep": DrawSpec("integer", high=1000)}
)


def tokenize(captions):
    return {"input_ids_1": torch.tensor([list(text.encode()[:40].ljust(40)) for text in captions])}


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    root = tmp_path_factory.mktemp("validation")
    write_folder(root / "data", [(64, 64), (64, 64), (96, 40)] * 12)
    return TrainConfig.model_validate(
        {
            "data": {
                "dirs": (str(root / "data"),),
                "repeats": (2,),
                "resolution": (64, 64),
                "enable_bucket": True,
                "min_bucket_reso": 32,
                "max_bucket_reso": 128,
                "bucket_reso_steps": 32,
                "flip": True,
                "random_crop": True,
                "workers": 0,
                "cache_dir": str(root / "cache"),
            },
            "captions": {"shuffle": True, "dropout_rate": 0.5},
            "training": {"batch_size": 2, "seed": 3},
            "validation": {"split": 0.4},
        }
    )


@pytest.fixture(scope="module")
def data(cfg):
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def changed(cfg, section, **fields):
    return cfg.model_copy(update={section: getattr(cfg, section).model_copy(update=fields)})


def samples(cfg, data, dp_rank=0, dp_size=1):
    return [
        (batch.keys[i], int(batch.occurrence[i]), *(t[i].numpy().tobytes() for t in batch.tensors().values()))
        for batch in held_out_set(cfg, data).batches(tokenize, FEATURES, dp_rank, dp_size)
        for i in range(len(batch.keys))
    ]


def held_out(cfg, data):
    plan = make_plan(data, cfg, 1)
    trained = {draw.key for step in range(plan.total_steps(1)) for draw in plan.batch(step)[1]}
    return {data.index.record(i).key for i in range(data.index.count)} - trained


def test_every_held_out_record_comes_once(cfg, data):
    found = samples(cfg, data)
    held = held_out(cfg, data)
    assert 5 <= len(held) <= 25
    assert Counter(sample[0] for sample in found) == dict.fromkeys(held, 1)
    assert {sample[1] for sample in found} == {0}
    assert samples(cfg, data) == found  # the same draws at every validation


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "dp_size"), [(1, 1, 2), (1, 2, 2), (1, 1, 7), (4, 1, 1), (3, 1, 3)]
)
def test_ranks_share_them_without_loss(cfg, data, batch_size, accumulation, dp_size):
    split = changed(cfg, "training", batch_size=batch_size, accumulation=accumulation)
    together = [sample for rank in range(dp_size) for sample in samples(split, data, rank, dp_size)]
    assert sorted(together) == sorted(samples(cfg, data))
    for rank in range(dp_size):
        for batch in held_out_set(split, data).batches(tokenize, FEATURES, rank, dp_size):
            assert 1 <= len(batch.keys) <= batch_size and batch.counts == {"samples": float(len(batch.keys))}


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_max_steps_keeps_the_same_records_on_any_number_of_ranks(cfg, data, dp_size):
    limited = changed(cfg, "validation", max_steps=2)
    whole = changed(limited, "training", batch_size=4)
    split = changed(limited, "training", batch_size=4 // dp_size)
    found = [sample for rank in range(dp_size) for sample in samples(split, data, rank, dp_size)]
    assert sorted(found) == sorted(samples(whole, data))
    assert 4 < len(found) <= 8 < len(samples(cfg, data)) + 1


def test_pictures_and_captions_are_as_they_stand(cfg, data):
    plain = changed(changed(cfg, "data", flip=False, random_crop=False), "captions", shuffle=False, dropout_rate=0.0)
    assert samples(plain, data) == samples(cfg, data)
    for batch in held_out_set(cfg, data).batches(tokenize, FEATURES):
        for i, row in enumerate(batch.features["input_ids_1"]):
            record = data.index.record(int(batch.record_id[i]))
            assert bytes(row.tolist()).decode().rstrip() == record.captions[0]


def test_the_seed_of_validation_is_its_own_or_that_of_training(cfg, data):
    own = changed(cfg, "validation", seed=3)
    assert samples(own, data) == samples(cfg, data)
    other = open_data(
        changed(cfg, "validation", seed=4), prepare(changed(cfg, "validation", seed=4), log=lambda line: None)
    )
    assert held_out(cfg, other) != held_out(cfg, data)


def test_a_spoilt_picture_is_left_out_and_named(cfg, data, caplog):
    before = samples(cfg, data)
    record = next(r for i in range(data.index.count) if (r := data.index.record(i)).key == before[0][0])
    path = next(iter((__import__("pathlib").Path(cfg.data.dirs[0])).glob(record.name.rpartition("/")[2])))
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[: len(kept) // 2])
        found = samples(cfg, data)
    finally:
        path.write_bytes(kept)
    assert sorted(found) == sorted(before[1:])
    assert any(path.name in r.getMessage() and "validation" in r.getMessage() for r in caplog.records)


def test_nothing_held_out_is_nothing_to_look_at(cfg):
    none = changed(cfg, "validation", split=0.0)
    data = open_data(none, prepare(none, log=lambda line: None))
    assert list(held_out_set(none, data).batches(tokenize, FEATURES)) == []
