"""The loader: the same batches for any number of workers and ranks, from any step, whatever happens to the files."""

import dataclasses
import errno
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from rejects import kind
from torch.utils.data import Dataset

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, DataFault, DrawSpec, FeatureSpec, TrainingFault
from difftrain.data import loader as loader_module
from difftrain.data.loader import data_loader, items_of, make_loader, num_workers
from difftrain.data.prepare import make_plan, open_data, prepare
from difftrain.data.samples import SampleMaker
from difftrain.diffusion.draws import integer, normal, uniform
from difftrain.testing.pictures import write_folder, write_tar

FEATURES = FeatureSpec(
    features={},
    draws={
        "noise": DrawSpec("normal", channels=4, factor=8),
        "timestep": DrawSpec("integer", high=1000),
        "u": DrawSpec("uniform"),
    },
)
SIZES = [(64, 64), (64, 64), (96, 40), (70, 60), (40, 96), (64, 64), (128, 128), (90, 40), (64, 66), (64, 64)]


def tokenize(captions):
    """Stand in for a tokenizer: the text itself, so that a test can read it back."""
    rows = [list(text.encode()[:60].ljust(60)) for text in captions]
    return {"input_ids_1": torch.tensor(rows, dtype=torch.int64)}


def captions_in(batch):
    return [bytes(row.tolist()).decode().rstrip() for row in batch.features["input_ids_1"]]


def config(root, dirs, batch_size=2, accumulation=1, workers=0, **sections):
    data = {
        "dirs": tuple(map(str, dirs)),
        "resolution": (64, 64),
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "bucket_reso_steps": 32,
        "workers": workers,
        "cache_dir": str(root / "cache"),
    } | sections.pop("data", {})
    training = {"batch_size": batch_size, "accumulation": accumulation, "seed": 1} | sections.pop("training", {})
    return TrainConfig.model_validate({"data": data, "training": training} | sections)


def changed(cfg, **sections):
    """Return the configuration with fields of sections replaced."""
    return cfg.model_copy(
        update={name: getattr(cfg, name).model_copy(update=fields) for name, fields in sections.items()}
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("loader")


@pytest.fixture(scope="module")
def pictures(root):
    write_folder(root / "data" / "a", SIZES)
    write_folder(root / "data" / "b", SIZES[:4], start=100)
    return [root / "data" / "a", root / "data" / "b"]


@pytest.fixture(scope="module")
def cfg(root, pictures):
    return config(
        root, pictures, data={"repeats": (1, 3), "flip": True, "random_crop": True}, captions={"shuffle": True}
    )


@pytest.fixture(scope="module")
def data(cfg):
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def make_loader_of(cfg, data, dp_rank=0, dp_size=1, first=0, last=12, features=FEATURES):
    plan = make_plan(data, cfg, cfg.training.batch_size * cfg.training.accumulation * dp_size)
    place = {"dp_rank": dp_rank, "dp_size": dp_size, "first_step": first, "last_step": last}
    return make_loader(data, plan, features, tokenize, cfg, **place)


def steps_of(*args, **more):
    return list(make_loader_of(*args, **more))


def assert_same(a, b):
    """Compare two lists of steps bit by bit."""
    assert len(a) == len(b)
    for micro_a, micro_b in zip(a, b):
        assert len(micro_a) == len(micro_b)
        for x, y in zip(micro_a, micro_b):
            assert (x.bucket, x.keys, x.counts, x.rejects) == (y.bucket, y.keys, y.counts, y.rejects)
            assert torch.equal(x.record_id, y.record_id) and torch.equal(x.occurrence, y.occurrence)
            assert x.tensors().keys() == y.tensors().keys()
            for name, tensor in x.tensors().items():
                assert tensor.dtype == y.tensors()[name].dtype and torch.equal(tensor, y.tensors()[name]), name


def samples_in(micro):
    """Return every sample of a step's micro batches as something that can be compared and counted."""
    return [
        (
            batch.bucket,
            batch.keys[i],
            int(batch.occurrence[i]),
            *(t[i].numpy().tobytes() for t in batch.tensors().values()),
        )
        for batch in micro
        for i in range(len(batch.keys))
    ]


@pytest.fixture
def many_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def test_batches_are_what_the_model_takes(cfg, data):
    plan = make_plan(data, cfg, 2)
    for step, [batch] in enumerate(steps_of(cfg, data)):
        bucket, draws = plan.batch(step)
        assert isinstance(batch, Batch) and batch.bucket == bucket and batch.counts == {"samples": 2.0}
        pixels = batch.features["pixels"]
        assert pixels.shape == (2, 3, bucket.height, bucket.width) and pixels.dtype == torch.uint8
        assert batch.keys == tuple(draw.key for draw in draws)
        assert batch.record_id.tolist() == [draw.record_id for draw in draws]
        assert batch.occurrence.tolist() == [draw.occurrence for draw in draws]
        assert batch.features["target_size"].tolist() == [[bucket.height, bucket.width]] * 2
        for i, draw in enumerate(draws):
            record = data.index.record(draw.record_id)
            assert tuple(batch.features["original_size"][i].tolist()) == record.size_hw
            shape = (4, bucket.height // 8, bucket.width // 8)
            place = (1, draw.key, draw.occurrence)
            assert np.array_equal(batch.draws["noise"][i].numpy(), normal(*place, "noise", shape))
            assert int(batch.draws["timestep"][i]) == integer(*place, "timestep", 1000)
            assert float(batch.draws["u"][i]) == float(np.float32(uniform(*place, "u")))
            words = sorted(part.strip() for part in captions_in(batch)[i].split(","))
            assert words == sorted(part.strip() for part in record.captions[0].split(","))
    assert batch.draws["timestep"].dtype == torch.int64 and batch.draws["u"].dtype == torch.float32


def test_any_number_of_workers_gives_the_same_bits(cfg, data, many_processors):
    alone = steps_of(cfg, data)
    for workers in (1, 3):
        assert num_workers(workers) == workers
        assert_same(steps_of(changed(cfg, data={"workers": workers}), data), alone)


@pytest.mark.parametrize(
    ("accumulation", "dp_size", "batch_size"), [(1, 2, 2), (2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)]
)
def test_any_split_of_the_global_batch_sees_the_same_samples(cfg, data, accumulation, dp_size, batch_size):
    whole = steps_of(changed(cfg, training={"batch_size": 4}), data)
    split = changed(cfg, training={"batch_size": batch_size, "accumulation": accumulation})
    ranks = [steps_of(split, data, rank, dp_size) for rank in range(dp_size)]
    for step, [batch] in enumerate(whole):
        parts = [rank[step] for rank in ranks]
        assert all(len(part) == accumulation for part in parts)
        assert all(len(micro.keys) == batch_size for part in parts for micro in part)
        together = [sample for part in parts for sample in samples_in(part)]
        assert sorted(together) == sorted(samples_in([batch]))


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_late_equals_skipping(cfg, data, workers, many_processors):
    cfg = changed(cfg, data={"workers": workers}, training={"batch_size": 1, "accumulation": 2})
    assert_same(steps_of(cfg, data, first=7), steps_of(cfg, data)[7:])


def test_flips_and_crops_are_drawn_anew_for_every_use(root, pictures):
    base = config(root, pictures, batch_size=1, data={"enable_bucket": False})  # 64 x 64 for all: 96 x 40 is cut
    data = open_data(base, prepare(base, log=lambda line: None))
    plain = looks(base, data)
    assert all(len(seen) == 1 for seen in plain.values())
    flipped = looks(changed(base, data={"flip": True}), data)
    for key, seen in flipped.items():
        [(as_it_is, _)] = plain[key]
        mirrored = torch.frombuffer(bytearray(as_it_is), dtype=torch.uint8).view(3, 64, 64).flip(2).numpy().tobytes()
        fit = data.recipes[0].buckets.select(size_of(data, key)[::-1])
        assert seen <= {(as_it_is, fit.top_left(False)), (mirrored, fit.top_left(True))}
    assert sum(len(seen) == 2 for seen in flipped.values()) >= 10  # of 14, six uses each
    cropped = looks(changed(base, data={"random_crop": True}), data)
    wide = [key for key in cropped if size_of(data, key) in ((40, 96), (96, 40), (40, 90))]
    assert len(wide) >= 3 and all(len({pixels for pixels, _ in cropped[key]}) >= 3 for key in wide)
    square = [key for key in cropped if size_of(data, key) == (64, 64)]
    assert len(square) >= 3 and all(cropped[key] == plain[key] for key in square)


def size_of(data, key):
    return next(record.size_hw for i in range(data.index.count) if (record := data.index.record(i)).key == key)


def looks(cfg, data):
    """Return for each record the different (pixels, conditioning) that six epochs show of it."""
    seen = {}
    for [batch] in steps_of(cfg, data, last=6 * data.index.count):
        conditions = tuple(batch.features["crop_top_left"][0].tolist())
        seen.setdefault(batch.keys[0], set()).add((batch.features["pixels"][0].numpy().tobytes(), conditions))
    return seen


def test_no_random_state_is_read_or_moved(cfg, data):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]

    torch.manual_seed(1)
    before = states()
    first = steps_of(changed(cfg, data={"workers": 1}), data, last=4)
    assert states() == before
    torch.manual_seed(2)
    random.seed(5)
    assert_same(steps_of(cfg, data, last=4), first)


@pytest.fixture
def broken(root, tmp_path):
    """A folder of which two pictures are spoilt after it was indexed."""
    folder = write_folder(tmp_path / "spoilt", [(64, 64)] * 7 + [(96, 40)] * 2)
    cfg = config(tmp_path, [folder], batch_size=2)
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    whole = steps_of(cfg, data, last=18)
    (folder / "0002.png").unlink()
    (folder / "0004.png").write_bytes(b"no longer a picture")
    return cfg, data, whole, folder


def test_a_spoilt_picture_is_replaced_and_named(broken, many_processors):
    cfg, data, whole, _ = broken
    now = steps_of(cfg, data, last=18)
    by_key = {data.index.record(i).key: data.index.record(i) for i in range(data.index.count)}
    square = sorted(key for key, record in by_key.items() if record.size_hw == (64, 64))
    gone = {key for key, record in by_key.items() if record.name.endswith(("0002.png", "0004.png"))}
    replaced = 0
    for [before], [after] in zip(whole, now):
        expected = []
        for key in before.keys:
            while key in gone:
                key = square[(square.index(key) + 1) % len(square)]
            expected.append(key)
        assert list(after.keys) == expected
        named = {reject.path for reject in after.rejects}
        assert named >= {data.index.path(by_key[key]) for key in before.keys if key in gone}
        assert all(torch.equal(before.draws[name], after.draws[name]) for name in before.draws)
        assert torch.equal(before.occurrence, after.occurrence)
        replaced += sum(a != b for a, b in zip(before.keys, after.keys))
    assert replaced == 8  # two pictures, four epochs
    reasons = {reject.path[-8:]: reject.reason for [batch] in now for reject in batch.rejects}
    assert kind(reasons["0004.png"]) == "not image" and os.strerror(errno.ENOENT) in reasons["0002.png"]
    assert_same(steps_of(changed(cfg, data={"workers": 2}), data, last=18), now)
    halves = [steps_of(changed(cfg, training={"batch_size": 1}), data, rank, 2, last=18) for rank in range(2)]
    for step, micro in enumerate(now):
        assert sorted(samples_in(micro)) == sorted(samples_in(halves[0][step] + halves[1][step]))


def test_a_picture_of_another_size_than_indexed_is_replaced(broken):
    cfg, data, _, folder = broken
    (folder / "0001.png").write_bytes((folder / "0007.png").read_bytes())
    reasons = {reject.path[-8:]: reject.reason for [batch] in steps_of(cfg, data, last=5) for reject in batch.rejects}
    assert re.match("changed: 96 x 40 px, 64 x 64 ", reasons["0001.png"])


@pytest.mark.parametrize("workers", [0, 1])
def test_when_all_pictures_are_gone_the_paths_are_named(broken, workers):
    cfg, data, _, folder = broken
    for path in folder.glob("*.png"):
        path.unlink()
    with pytest.raises(DataFault) as caught:
        steps_of(changed(cfg, data={"workers": workers}), data)
    assert re.match(r"bucket \d+x\d+: ", str(caught.value))
    assert str(caught.value).count(".png (") >= 2 and "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_entry_of_the_cache_is_named_without_a_workers_traceback(cfg, data, monkeypatch, workers):
    def damaged(self, *args):
        raise TrainingFault("CACHE: segment seg-1 is damaged")

    monkeypatch.setattr(SampleMaker, "batch", damaged)
    with pytest.raises(TrainingFault) as caught:
        steps_of(changed(cfg, data={"workers": workers}), data)
    assert str(caught.value) == "CACHE: segment seg-1 is damaged"


def test_sizes_that_the_model_cannot_take_are_refused(cfg, data):
    with pytest.raises(DataFault, match=r"multiples of 64, .*32.*--resolution .*--bucket_reso_steps"):
        steps_of(cfg, data, features=dataclasses.replace(FEATURES, size_multiple=64))


def test_workers_are_capped_and_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    loader_module._log_capped.cache_clear()
    with caplog.at_level("INFO", "difftrain"):
        assert [num_workers(8, local_size=2), num_workers(8, local_size=2), num_workers(1), num_workers(0)] == [
            2,
            2,
            1,
            0,
        ]
        assert num_workers(8, local_size=16) == 1
    first, second = [record.getMessage() for record in caplog.records]
    assert re.search(r"^2 .* 8 \(--max_data_loader_n_workers\): 4 .* 2 ranks", first)
    assert second.startswith("1 loader process ") and " of 8" in second


class Signalled(Dataset):
    """Answer from a worker that a batch system has told to end."""

    def __getitem__(self, n):
        for name in ("INT", "USR1", "TERM") if n < 2 else ():
            subprocess.run(["kill", f"-{name}", str(os.getpid())], check=True)
        while signal.SIGTERM in signal.sigpending():  # two that wait are one, and the parent's would be lost in it
            time.sleep(0.001)
        return os.getpid(), torch.get_num_threads()


class Killed(Dataset):
    def __getitem__(self, n):
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_leave_signals_to_the_parent():
    (first, threads), (second, _) = list(items_of(data_loader(Signalled(), range(2), 1)))
    assert first == second != os.getpid() and threads == 1


def test_the_parent_can_end_a_worker():
    loop = iter(data_loader(Signalled(), range(100), 1))
    for _ in range(2):
        next(loop)
    [worker] = multiprocessing.active_children()
    worker.terminate()  # what an interpreter does with its children before it exits
    worker.join(10)
    assert worker.exitcode == 0
    del loop


def test_workers_end_with_the_loop_that_used_them(cfg, data):
    steps = make_loader_of(changed(cfg, data={"workers": 1}), data, last=200)
    loop = iter(steps)
    next(loop)
    workers = multiprocessing.active_children()
    assert len(workers) == 1
    del loop  # as when training stops early
    workers[0].join(10)
    assert not workers[0].is_alive()


def test_the_data_set_of_a_loader_can_be_sent_to_another_interpreter(cfg, data):
    dataset = make_loader_of(cfg, data, last=4)._loader.dataset
    assert_same([[pickle.loads(pickle.dumps(dataset))[n] for n in range(4)]], [[dataset[n] for n in range(4)]])


def test_a_killed_worker_is_named():
    with pytest.raises(TrainingFault, match="max_data_loader_n_workers"):
        list(items_of(data_loader(Killed(), range(4), 1)))


@pytest.mark.flags("tar_order", "tar_streams", "tar_window")
def test_tars_in_sequence_are_asked_for_ahead(tmp_path, monkeypatch):
    for shard in range(8):
        write_tar(tmp_path / "tars" / f"{shard:05d}.tar", [(64, 64)] * 12, start=100 * shard)
    cfg = config(
        tmp_path,
        [tmp_path / "tars"],
        batch_size=4,
        data={"tar_order": "sequential", "tar_streams": 2, "tar_window": 1},
    )
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    asked = []
    monkeypatch.setattr("difftrain.data.plan.readahead._PIECE", 1 << 14)
    real = os.posix_fadvise

    def advise(descriptor, offset, length, advice):
        asked.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), offset, length))  # noqa: PTH115, PTH119
        return real(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    seen = []
    for [batch] in steps_of(cfg, data, last=24):  # an epoch
        stream = [data.index.record(int(i)).name.partition("!")[0][-9:] for i in batch.record_id[0::2]]
        seen += [shard for shard in stream if shard not in seen]
        for shard in seen[1:]:  # all but the stream's first shard were requested before a picture of them was read
            size = (tmp_path / "tars" / shard).stat().st_size
            assert sum(length for name, _, length in asked if name == shard) >= 0.5 * size, shard
    assert len(seen) >= 4
    # Each shard once, but for those in which one stream ends and the other begins, and the next epoch's first two.
    total = sum(path.stat().st_size for path in (tmp_path / "tars").iterdir())
    assert sum(length for *_, length in asked) <= (8 + 3) / 8 * total
    assert len({(name, offset) for name, offset, _ in asked}) >= 0.8 * len(asked)
