"""The index: ids by key, facts by id, unchanged files never read again, whole or absent."""

import io
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from index_lines import read_again

import difftrain
from difftrain.config import CaptionSection, DataSection
from difftrain.contracts import DataFault, TrainingFault
from difftrain.data.index import build as indexing
from difftrain.data.index.build import build_index
from difftrain.data.index.index import Index, newest
from difftrain.data.index.inspection import record_key
from difftrain.data.media.media import decode
from difftrain.testing.pictures import picture, write_folder, write_tar
from difftrain.testing.synthetic_index import write_synthetic_index


@pytest.fixture
def build(tmp_path):
    """Build the index of some folders; return (index, what was said)."""

    def call(*dirs, captions=None, folder="index", **data):
        said = []
        section = DataSection(dirs=tuple(str(d) for d in dirs), **data)
        summary = build_index(section, CaptionSection(**(captions or {})), tmp_path / folder, log=said.append)
        return Index(Path(summary.folder)), "\n".join(said)

    return call


def facts(index):
    return [index.record(i) for i in range(index.count)]


def read_and_known(said):
    (line,) = [line for line in said.splitlines() if line.startswith("index: looking at")]
    words = line.replace(",", "").split()
    return int(words[3]), int(words[8])


def test_records_of_every_kind_of_source(build, tmp_path):
    import pyarrow
    from pyarrow import parquet

    write_folder(tmp_path / "a", [(20, 30), (40, 16)])
    write_tar(tmp_path / "b" / "0.tar", [(24, 18)], start=5)
    write_tar(tmp_path / "b" / "1.tar", [(30, 22), (16, 16)], start=7)
    (tmp_path / "c").mkdir()
    table = pyarrow.table({"image": [picture(20, (33, 17)), picture(21, (18, 19))], "text": ["x", "y"]})
    parquet.write_table(table, tmp_path / "c" / "t.parquet", row_group_size=1)
    (tmp_path / "d" / "3_blue cat").mkdir(parents=True)
    (tmp_path / "d" / "3_blue cat" / "p.png").write_bytes(picture(30, (50, 20)))
    index, said = build(*(tmp_path / name for name in "abcd"), repeats=(1, 2, 1, 5))

    by_name = {record.name: record for record in facts(index)}
    assert {name: (record.captions, record.size_hw) for name, record in by_name.items()} == {
        "a/0000.png": (("picture 0, second, third",), (30, 20)),
        "a/0001.png": (("picture 1, second, third",), (16, 40)),
        "b/0.tar!00005.png": (("picture 5, second, third",), (18, 24)),
        "b/1.tar!00007.png": (("picture 7, second, third",), (22, 30)),
        "b/1.tar!00008.png": (("picture 8, second, third",), (16, 16)),
        "c/t.parquet!0": (("x",), (17, 33)),
        "c/t.parquet!1": (("y",), (19, 18)),
        "d/3_blue cat/p.png": (("blue cat",), (20, 50)),
    }
    numbers = {"a/0000.png": 0, "b/1.tar!00008.png": 8, "c/t.parquet!1": 21, "d/3_blue cat/p.png": 30}
    for name, number in numbers.items():
        record = by_name[name]
        size = record.size_hw[::-1]
        assert index.read(record.media) == picture(number, size)
        assert decode(index.read(record.media)).shape[:2] == record.size_hw
    assert by_name["b/1.tar!00008.png"].key == record_key("1", "1.tar/00008.png")
    assert by_name["d/3_blue cat/p.png"].key == record_key("3", "3_blue cat/p.png")
    assert [source.repeats for source in index.sources] == [1, 2, 1, 3]
    assert (
        index.shard_paths(1) == ["0.tar", "1.tar"]
        and index.shard_paths(0) == []
        and index.summary.shards == (0, 2, 1, 0)
    )
    assert re.search(r"captions: 2 .*\.txt .*, 1 ", said)

    columns = index.columns()
    assert columns.keys.dtype == np.uint8 and columns.keys.shape == (8, 16)
    keys = [key.tobytes() for key in columns.keys]
    assert keys == sorted(keys) == [record.key for record in facts(index)]
    assert [(h, w) for h, w in zip(columns.height, columns.width)] == [record.size_hw for record in facts(index)]
    assert columns.source.tolist() == [record.media.source for record in facts(index)]
    shard = {record.name: int(columns.shard[record.id]) for record in facts(index)}
    assert shard["b/1.tar!00008.png"] == 1 and sum(shard.values()) == 2


def test_unchanged_files_are_not_opened_again(build, tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 5)
    write_tar(tmp_path / "b" / "0.tar", [(20, 20)] * 2, start=50)
    write_tar(tmp_path / "b" / "1.tar", [(20, 20)] * 2, start=60)
    (folder / "bad.png").write_bytes(b"text")
    (folder / "bad.txt").write_text("a bad one")
    first, said = build(folder, tmp_path / "b")
    assert read_and_known(said) == (8, 0)

    monkeypatch.setattr(indexing, "run_jobs", None)  # would fail if it were called
    again, said = build(folder, tmp_path / "b")
    assert again.folder == first.folder and read_again(said) == 0
    monkeypatch.undo()

    (folder / "0001.txt").write_text("another caption")  # changed
    (folder / "0002.png").write_bytes(picture(99, (22, 22)))  # changed
    (folder / "0003.png").unlink()  # removed
    (folder / "0003.txt").unlink()
    write_folder(folder, [(20, 20)], start=77)  # new
    write_tar(tmp_path / "b" / "1.tar", [(20, 20)] * 3, start=60)  # changed
    third, said = build(folder, tmp_path / "b")
    assert read_and_known(said) == (4, 4) and read_again(said) is None
    fresh, _ = build(folder, tmp_path / "b", folder="fresh")
    assert facts(third) == facts(fresh) and third.fingerprint == fresh.fingerprint
    assert list(third.rejects()) == list(fresh.rejects()) and list(third.summary.reasons.values()) == [1]
    assert third.count == 5 + 2 + 3
    (folder / "0004.png").unlink()
    fourth, said = build(folder, tmp_path / "b")
    assert fourth.count == third.count - 1 and re.search(r"\(0 .*, 7 .*\)$", said, re.MULTILINE)


@pytest.mark.flags("verify_data")
def test_an_earlier_index_is_found_by_a_relative_path(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 3)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    for _ in range(2):
        build_index(DataSection(dirs=(str(folder),), workers=0), CaptionSection(), Path("cache"), log=said.append)
    assert read_again(said[-1]) == 0


def test_the_level_of_looking_decides_what_is_known(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 3)
    quick, said = build(folder, verify="quick")
    assert "verify=quick" in said and quick.duplicates is None and quick.record(0).content is None
    full, said = build(folder, verify="full")
    assert read_and_known(said) == (3, 0) and full.duplicates == 0 and full.record(0).content
    back, said = build(folder, verify="quick")
    assert read_again(said) == 0 and back.duplicates == 0
    assert quick.fingerprint == full.fingerprint


def test_verify_auto_chooses_by_the_number_of_items(build, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "AUTO_FULL_ITEMS", 4)
    write_tar(tmp_path / "a" / "0.tar", [(20, 20)] * 2)
    write_tar(tmp_path / "a" / "1.tar", [(20, 20)] * 2, start=2)
    index, said = build(tmp_path / "a")
    assert "verify=auto, 4 items, so full" in said and index.summary.verify == "full"
    write_tar(tmp_path / "a" / "2.tar", [(20, 20)], start=9)
    index, said = build(tmp_path / "a", folder="other")
    assert "verify=auto, more than 4 items, so quick" in said and index.summary.verify == "quick"


def test_quick_and_full_agree_and_quick_decodes_what_looks_cut(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20 + i, 30) for i in range(6)])
    whole = (folder / "0001.png").read_bytes()
    (folder / "0001.png").write_bytes(whole[: len(whole) // 2])
    for verify in ("quick", "full"):
        index, _ = build(folder, verify=verify, folder=verify)
        assert index.count == 5 and index.summary.reasons == {"truncated": 1}, verify
    assert facts(Index.open(tmp_path / "quick"))[0].size_hw == facts(Index.open(tmp_path / "full"))[0].size_hw


def test_caption_files_are_tried_in_order(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 3)
    (folder / "0001.caption").write_text("from .caption")
    (folder / "lonely.txt").write_text("no picture")
    index, said = build(folder)
    captions = {record.name: record.captions for record in facts(index)}
    assert captions["a/0001.png"] == ("from .caption",)
    assert "captions: 1 from .caption files, 2 from .txt files" in said
    assert re.search(rf"{folder}: 1 caption .* lonely\.txt", said)
    (folder / "0001.caption").unlink()
    index, said = build(folder)
    assert index.record(0) and read_and_known(said) == (1, 2)
    assert {r.captions for r in facts(index)} == {(f"picture {i}, second, third",) for i in range(3)}
    with pytest.raises(DataFault) as caught:
        build(folder, captions={"extension": "caption"}, folder="other")
    assert re.findall(r"(\d+) x ([a-z ]+)", str(caught.value)) == [("3", "no caption")]


def test_other_trainers_caches_and_foreign_files_are_named_once(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 2)
    for name in ("0000_sdxl.npz", "0001_sdxl.npz", "0000_te_outputs.npz", "x.heic"):
        (folder / name).write_bytes(b"x")
    index, said = build(folder)
    assert index.count == 2
    assert f"{folder}: 2 *_sdxl.npz, 1 *_te_outputs.npz: " in said
    assert "not read: 1 .heic" in said


def test_pictures_outside_kohyas_folders_are_rejected_by_name(build, tmp_path):
    write_folder(tmp_path / "a" / "2_cat", [(20, 20)] * 3)
    write_folder(tmp_path / "a" / "notes", [(20, 20)])
    index, _ = build(tmp_path / "a")
    (reject,) = index.rejects()
    assert reject.path == str(tmp_path / "a" / "notes" / "0000.png") and reject.reason.startswith(
        "outside the <repeats>"
    )
    assert index.count == 3
    again, said = build(tmp_path / "a")
    assert again.folder == index.folder and read_again(said) == 0


def test_a_stray_picture_and_deeper_ones_leave_class_folders_as_they_are(build, tmp_path):
    write_folder(tmp_path / "a" / "2_cat", [(20, 20)] * 3)
    write_folder(tmp_path / "a" / "2_cat" / "deeper", [(20, 20)])
    (tmp_path / "a" / "cover.png").write_bytes(picture(5, (20, 20)))
    index, said = build(tmp_path / "a")
    assert index.count == 3 and [source.repeats for source in index.sources] == [2]
    rejected = {reject.path for reject in index.rejects()}
    assert rejected == {str(tmp_path / "a" / name) for name in ("cover.png", "2_cat/deeper/0000.png")}
    assert "2 images" in said and "for example 2_cat/deeper/0000.png" in said


def test_a_caption_goes_to_the_faces_that_were_cut_out_of_its_picture(build, tmp_path):
    for name in ("f_30_30_20_20.png", "g_1_2_3_4.png", "f.png"):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(picture(len(name), (40, 40)))
    (tmp_path / "a" / "f.txt").write_text("of f")
    (tmp_path / "a" / "g_1_2_3_4.txt").write_text("its own")
    (tmp_path / "a" / "g.txt").write_text("of g")
    index, said = build(tmp_path / "a")
    captions = {record.name.rpartition("/")[2]: record.captions for record in facts(index)}
    assert captions == {"f_30_30_20_20.png": ("of f",), "f.png": ("of f",), "g_1_2_3_4.png": ("its own",)}
    assert "f.txt" not in said


def test_pictures_without_a_caption_are_counted_where_they_are_trained(build, tmp_path):
    write_folder(tmp_path / "a", [(20, 20)] * 3)
    (tmp_path / "a" / "0001.txt").unlink()
    index, said = build(tmp_path / "a", captions={"allow_empty": True})
    assert index.count == 3 and any(line.startswith("index: 1 ") and "a/0001.png" in line for line in said.splitlines())


def test_whether_empty_captions_count_makes_no_index_of_captioned_pictures(build, tmp_path):
    write_folder(tmp_path / "a", [(20, 20)] * 3)
    first, _ = build(tmp_path / "a")
    again, said = build(tmp_path / "a", captions={"allow_empty": True})
    assert again.folder == first.folder and "index: looking at" not in said
    assert build(tmp_path / "a")[0].folder == first.folder


@pytest.mark.parametrize("sharded", [False, True])
def test_what_has_no_caption_is_looked_at_again_where_it_counts_otherwise(build, tmp_path, sharded):
    if sharded:
        write_tar(tmp_path / "a" / "0.tar", [(20, 20)] * 3)
        with tarfile.open(tmp_path / "a" / "0.tar", "a") as tar:
            content = picture(7, (20, 20))
            member = tarfile.TarInfo("bare.png")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    else:
        write_folder(tmp_path / "a", [(20, 20)] * 4)
        (tmp_path / "a" / "0001.txt").unlink()
    for _ in range(2):
        index, _ = build(tmp_path / "a")
        assert (index.count, index.summary.reasons) == (3, {"no caption": 1})
        index, said = build(tmp_path / "a", captions={"allow_empty": True})
        assert (index.count, index.summary.reasons) == (4, {})
        assert sum(record.captions == ("",) for record in facts(index)) == 1
        assert read_and_known(said) == ((1, 0) if sharded else (1, 3))


@pytest.mark.workers
def test_one_large_shard_is_divided_among_processes(tmp_path, monkeypatch):
    write_tar(tmp_path / "a" / "0.tar", [(16 + i % 7, 16) for i in range(200)])
    monkeypatch.setattr(indexing, "_cpus", lambda: 3)
    parts = []
    original = indexing._Builder._jobs

    def jobs(self, level, share):
        parts.append(share)
        return original(self, level, share)

    monkeypatch.setattr(indexing._Builder, "_jobs", jobs)
    section = DataSection(dirs=(str(tmp_path / "a"),), verify="full")
    summary = build_index(section, CaptionSection(), tmp_path / "i", log=lambda line: None, workers=3)
    assert summary.count == 200 and parts == [3]
    names = {record.name for record in facts(Index(Path(summary.folder)))}
    assert names == {f"a/0.tar!{i:05d}.png" for i in range(200)}


def test_passing_faults_are_looked_at_again(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 4)
    (folder / "link.png").symlink_to(tmp_path / "not yet")
    (folder / "link.txt").write_text("a link")
    index, _ = build(folder)
    assert index.summary.reasons == {reject.reason.partition(":")[0]: 1 for reject in index.rejects()}
    first = index.folder
    for _ in range(4):  # of a sweep of runs none takes another's index away
        index, said = build(folder)
        assert read_and_known(said) == (1, 4) and index.folder == first
        assert read_again(said) == 1
    (tmp_path / "not yet").write_bytes(picture(9, (20, 20)))
    index, _ = build(folder)
    assert index.count == 5 and not index.summary.rejected and index.folder != first
    (folder / "0001.txt").write_text("another caption, beside one that passes")
    (folder / "link.txt").unlink()
    second = index.folder
    index, _ = build(folder)
    assert index.folder != second and index.summary.reasons == {"no caption": 1}


# ---- reading


def test_an_index_is_picklable_and_crosses_forks_and_threads(tmp_path):
    index = write_synthetic_index(tmp_path, 500, repeats=(1, 3))
    want = index.records(range(500))
    assert pickle.loads(pickle.dumps(index)).records(range(500)) == want
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"1" if index.records(range(500)) == want else b"0")
        os._exit(0)
    assert os.read(read, 1) == b"1" and os.waitpid(child, 0)[1] == 0
    got = []
    threads = [threading.Thread(target=lambda: got.append(index.records(range(500)) == want)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [True] * 4
    with pytest.raises(IndexError, match="ids 0 to 499"):
        index.record(500)
    with pytest.raises(IndexError):
        index.record(-1)


def test_a_worker_reads_the_index_its_parent_opened(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 3)
    index, _ = build(folder)
    before = facts(index)
    write_folder(folder, [(20, 20)] * 3, start=10)
    build(folder)
    assert facts(pickle.loads(pickle.dumps(index))) == before
    assert Index.open(tmp_path / "index").count == 6


def test_no_torch_is_imported_for_an_index(tmp_path):
    code = (
        "import sys; from difftrain.data.index import build, inspection; from difftrain.testing.synthetic_index import *;"
        "sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(difftrain.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


def test_opening_does_not_grow_with_the_index(tmp_path):
    """What is read to open an index of 200,000 records is a few pages."""
    write_synthetic_index(tmp_path, 200_000)
    started = time.perf_counter()
    index = Index.open(tmp_path)
    index.columns()
    index.record(199_999)
    assert time.perf_counter() - started < 0.5
    assert index.count == 200_000 and (np.diff(index.columns().keys[:, 0].astype(int)) >= 0).all()


# ---- whole or absent


def test_a_damaged_previous_index_is_built_afresh(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 3)
    index, _ = build(folder)
    want = facts(index)
    for name, damage in (
        ("index.sqlite", b"not a database" * 600),
        ("index.json", b"{"),
        ("index.json", b'{"format": 0}'),
    ):
        (index.folder / name).write_bytes(damage)
        index, said = build(folder)
        assert facts(index) == want and "index: " in said and read_and_known(said) == (3, 0)
    (index.folder / "index.sqlite").unlink()
    index, _ = build(folder)
    assert facts(index) == want
    (tmp_path / "index" / "current").write_text("../../elsewhere")
    index, _ = build(folder)
    assert facts(index) == want


def test_opening_what_is_not_there(tmp_path):
    with pytest.raises(DataFault, match=rf"^{tmp_path}: no index"):
        Index.open(tmp_path)
    write_synthetic_index(tmp_path, 3)
    meta = newest(tmp_path) / "index.json"
    meta.write_text(meta.read_text().replace('"format": ', '"format": 9'))
    with pytest.raises(DataFault, match=r"index-.* version"):
        Index.open(tmp_path)


def test_a_failed_build_leaves_the_last_index_and_no_litter(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 3)
    index, _ = build(folder)
    for path in folder.glob("*.txt"):
        path.unlink()
    (folder / "0000.txt").write_bytes(b"")
    with pytest.raises(DataFault):
        build(folder, max_rejected_share=0.1)
    write_folder(folder, [(20, 20)] * 3)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(DataFault):
        build(folder)
    assert facts(index) and not list((tmp_path / "index").glob("tmp-*"))


def test_a_full_disk_is_said_and_leaves_the_last_index(tmp_path):
    """A file size limit refuses writes as a full disk does; in a process of its own."""
    folder = write_folder(tmp_path / "a", [(20, 20)] * 3)
    section = DataSection(dirs=(str(folder),))
    before = build_index(section, CaptionSection(), tmp_path / "index", log=lambda line: None)
    write_folder(folder, [(20, 20)] * 200, start=10)
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            build_index(section, CaptionSection(), tmp_path / "index", log=lambda line: None)
        except TrainingFault as fault:
            said = str(fault)
            good = "data.cache_dir" in said and said.startswith(f"{tmp_path / 'index'}: ") and "MiB free" in said
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert Index.open(tmp_path / "index").folder == Path(before.folder)
    assert not list((tmp_path / "index").glob("tmp-*"))


def test_a_folder_that_cannot_be_written(build, tmp_path):
    (tmp_path / "index").write_text("a file where the folder should be")
    write_folder(tmp_path / "a", [(20, 20)])
    with pytest.raises(TrainingFault, match=rf"^{tmp_path / 'index'}: .*MiB free.*data\.cache_dir"):
        build(tmp_path / "a")


def test_data_on_a_read_only_disk(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 3)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
    for path in [*folder.iterdir(), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    index, _ = build(folder)
    assert index.count == 3 and sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir()) == before
    folder.chmod(0o755)


def test_two_builds_at_once_are_merely_wasteful(tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 30)
    section = DataSection(dirs=(str(folder),))
    code = (
        "import sys; from difftrain.config import *; from difftrain.data.index.build import build_index;"
        "build_index(DataSection(dirs=(sys.argv[1],)), CaptionSection(), sys.argv[2], log=print)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(difftrain.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "index")]
    others = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [other.wait() for other in others] == [0, 0]
    assert Index.open(tmp_path / "index").count == 30
    assert not list((tmp_path / "index").glob("tmp-*"))
    said = []
    build_index(section, CaptionSection(), tmp_path / "index", log=said.append)
    assert read_again(said[-1]) == 0


def test_old_indexes_go_and_litter_of_killed_builds_too(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)])
    litter = tmp_path / "index" / "tmp-old"
    litter.mkdir(parents=True)
    (litter / "index.sqlite").write_bytes(b"x")
    os.utime(litter, (0, 0))
    for i in range(4):
        write_folder(folder, [(20, 20)], start=i + 1)
        build(folder)
    kept = list((tmp_path / "index").glob("index-*"))
    assert len(kept) == 3 and newest(tmp_path / "index") in kept and not litter.exists()


def test_names_that_are_not_utf8_are_rejected_by_name(build, tmp_path):
    folder = write_folder(tmp_path / "a", [(20, 20)] * 2)
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(picture(1, (20, 20)))
    index, _ = build(folder)
    (reject,) = index.rejects()
    assert reject.path.endswith("caf\\udce9.png") and reject.reason.startswith("name not UTF-8: ") and index.count == 2
    again, said = build(folder)
    assert again.folder == index.folder and read_again(said) == 0
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as made:
        info = tarfile.TarInfo("café.png")
        info.size = 3
        made.addfile(info, io.BytesIO(b"abc"))
    with pytest.raises(DataFault, match="name not UTF-8"):
        build(tmp_path / "0.tar")
