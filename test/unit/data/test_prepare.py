"""Preparing data: where it is kept, what is said, what is made anew."""

import errno
import pickle
import re
import threading

import pytest
from refusals import names

from difftrain.config import TrainConfig
from difftrain.contracts import Bucket, DataFault, TrainingFault
from difftrain.data import prepare as module
from difftrain.data.prepare import index_folder, make_plan, open_data, prepare, tables_folder
from difftrain.testing.pictures import write_folder, write_tar


@pytest.fixture
def make(tmp_path):
    def config(*dirs, data=None, **sections):
        settings = {
            "dirs": tuple(str(tmp_path / folder) for folder in dirs),
            "resolution": (64, 64),
            "enable_bucket": True,
            "min_bucket_reso": 32,
            "max_bucket_reso": 128,
            "bucket_reso_steps": 32,
            "cache_dir": str(tmp_path / "cache"),
        } | (data or {})
        return TrainConfig.model_validate({"data": settings, "training": {"seed": 1}} | sections)

    return config


def said(cfg):
    lines = []
    return prepare(cfg, log=lines.append), "\n".join(lines)


def test_it_says_what_there_is(make, tmp_path):
    write_folder(tmp_path / "a", [(64, 64)] * 5 + [(96, 40)] * 2)
    write_tar(tmp_path / "t" / "0.tar", [(64, 64)] * 3, start=50)
    (tmp_path / "a" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    (tmp_path / "a" / "torn.txt").write_text("a torn picture")
    cfg = make("a", "t", data={"repeats": (1, 4), "tar_order": "sequential"})
    folder, text = said(cfg)
    assert any(line.startswith("data: ") and names(line, "10 records", 19) for line in text.splitlines())
    assert "bucket 64x64: 17" in text.splitlines() and "bucket 96x32: 2" in text.splitlines()
    assert "one shard" in text
    data = open_data(cfg, folder)
    summary = data.summary()
    assert (summary["count"], summary["draws_per_epoch"], summary["rejected"]) == (10, 19, 1)
    assert summary["buckets"]["64x64"] == 17 and summary["fingerprint"] == data.index.fingerprint
    assert summary["name"] == "a, t" and data.tables.shards == 2


def test_preparing_again_finds_everything_there(make, tmp_path, monkeypatch):
    write_folder(tmp_path / "a", [(64, 64)] * 5)
    cfg = make("a")
    first = prepare(cfg, log=lambda line: None)
    before = sorted((path, path.stat().st_mtime_ns) for path in first.rglob("*") if path.is_file())
    monkeypatch.setattr(module, "build_tables", None)  # would fail if it were called
    again = prepare(cfg, log=lambda line: None)
    assert sorted((path, path.stat().st_mtime_ns) for path in again.rglob("*") if path.is_file()) == before


def test_new_pictures_and_new_settings_make_new_tables(make, tmp_path):
    write_folder(tmp_path / "a", [(64, 64)] * 5 + [(96, 40)] * 3)
    cfg = make("a")
    old = open_data(cfg, prepare(cfg, log=lambda line: None))
    plan = make_plan(old, cfg, 2)
    before = [plan.batch(s) for s in range(10)]
    other = make("a", data={"enable_bucket": False})
    assert [rows.bucket for rows in open_data(other, prepare(other, log=lambda line: None)).tables.training] == [
        Bucket(64, 64)
    ]
    write_folder(tmp_path / "a", [(64, 64)], start=20)
    new = open_data(cfg, prepare(cfg, log=lambda line: None))
    assert new.index.count == 9 and make_plan(new, cfg, 2).digest != plan.digest
    assert [plan.batch(s) for s in range(10)] == before  # who opened the old ones keeps reading them


def test_the_folder_is_named_by_what_is_read(make, tmp_path):
    cfg = make("a")
    assert index_folder(cfg).parent == tmp_path / "cache" / "index"
    assert index_folder(cfg) == index_folder(make("a", data={"resolution": (128, 128)}))
    assert index_folder(cfg) != index_folder(make("b"))
    assert index_folder(cfg) != index_folder(make("a", data={"repeats": (2,)}))
    assert index_folder(cfg) != index_folder(make("a", captions={"extension": ".tags"}))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert index_folder(cfg) == index_folder(make("link"))


@pytest.mark.flags("cache_dir")
def test_the_users_cache_folder_is_respected(make, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cfg = make("a", data={"cache_dir": None})
    assert index_folder(cfg).parent == tmp_path / "xdg" / "difftrain" / "index"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert index_folder(cfg).parent == tmp_path / "home" / ".cache" / "difftrain" / "index"


def test_a_split_that_holds_out_nothing_or_all_is_refused(make, tmp_path):
    write_folder(tmp_path / "a", [(64, 64)] * 4)
    with pytest.raises(DataFault, match=r"--validation_split=0\.0001 .* none .*4 .*seed 1\b.*--validation_seed"):
        prepare(make("a", validation={"split": 0.0001}), log=lambda line: None)
    with pytest.raises(DataFault, match=r"--validation_split=0\.9999 .* all 4 "):
        prepare(make("a", validation={"split": 0.9999}), log=lambda line: None)


def test_two_processes_may_build_the_same_tables(make, tmp_path):
    write_folder(tmp_path / "a", [(64, 64)] * 5)
    cfg = make("a")
    index = module.Index(prepare(cfg, log=lambda line: None))
    folder = tables_folder(cfg, index)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    errors = []

    def build():
        try:
            module.make_tables(cfg, index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [path.name for path in index.folder.iterdir() if path.is_dir()] == [folder.name]
    assert open_data(cfg, index.folder).tables.count == 5


def test_a_full_disk_is_named(make, tmp_path, monkeypatch):
    write_folder(tmp_path / "a", [(64, 64)] * 2)

    def full(*args, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "build_tables", full)
    with pytest.raises(TrainingFault, match=r"No space .*on device.*data\.cache_dir"):
        prepare(make("a"), log=lambda line: None)


def test_data_travels_to_workers(make, tmp_path):
    write_folder(tmp_path / "a", [(64, 64)] * 5)
    cfg = make("a")
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    copy = pickle.loads(pickle.dumps(data))
    assert copy.summary() == data.summary()
    assert make_plan(copy, cfg, 2).batch(3) == make_plan(data, cfg, 2).batch(3)
    assert copy.index.record(2) == data.index.record(2)


def test_pictures_without_a_bucket_are_named_like_all_rejects(make, tmp_path):
    write_folder(tmp_path / "a", [(64, 64)] * 5 + [(64, 20)])
    cfg = make("a", data={"bucket_no_upscale": True})
    folder, text = said(cfg)
    assert "data: rejected, no bucket: 1" in text and "data: 5 records" in text
    data = open_data(cfg, folder)
    [reject] = data.rejects()
    assert reject.path == str(tmp_path / "a" / "0005.png")
    assert re.fullmatch("no bucket: 64 x 20 px, .* 32", reject.reason)
    assert (data.summary()["rejected"], data.summary()["rejected_by_reason"]) == (1, {"no bucket": 1})
    strict = make("a", data={"bucket_no_upscale": True, "max_rejected_share": 0.1})
    with pytest.raises(DataFault, match=r"1 of 6 .*\(--max_rejected_share=0\.1\), 1 .*0005\.png \(no bucket"):
        prepare(strict, log=lambda line: None)
    write_folder(tmp_path / "thin", [(64, 20)] * 2)
    with pytest.raises(DataFault, match=r"000[01].png \(no bucket"):
        prepare(make("thin", data={"bucket_no_upscale": True, "max_rejected_share": 1.0}), log=lambda line: None)
