"""Reading entries: what was written comes back, once checked, or it is named and so is what to do."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import re
from pathlib import Path

import pytest
import torch
from entries import BUCKET, FEATURES, address, filled, item, reader_of, refused, same, sample
from refusals import names

from difftrain.cache.store import read as reading
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.format import PackedEntry, crc32c, pack
from difftrain.cache.store.index import EntryRow, Metadata, merge
from difftrain.cache.store.memory import Verified, reserve
from difftrain.cache.store.read import Reader
from difftrain.cache.store.segment import SegmentFiles
from difftrain.cache.store.storage import stored
from difftrain.contracts import Bucket, Feature, TrainingFault

CHECKS = pytest.mark.parametrize("check", [True, False], ids=["checked", "not checked"])


def flip(folder: CacheFolder, number: int, place: int = 300) -> EntryRow:
    """Change one bit of an entry."""
    row = Metadata(folder.database).lookup(address(number))
    assert row is not None
    with folder.file(row.segment, BIN).open("r+b") as file:
        file.seek(row.offset + place)
        byte = file.read(1)[0]
        file.seek(row.offset + place)
        file.write(bytes([byte ^ 4]))
    return row


@CHECKS
def test_batches_in_any_order_are_what_was_written(tmp_path, check):
    reader = reader_of(filled(tmp_path / "cache", map(item, range(40)), segment_bytes=8000), check=check)
    for seed in range(30):
        numbers = random.Random(seed).choices(range(40), k=1 + seed % 7)
        assert same(reader.read([address(number) for number in numbers]), [sample(number) for number in numbers])


@CHECKS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_what_was_stored_in_another_dtype_comes_in_the_features_own(tmp_path, check, dtype):
    reader = reader_of(filled(tmp_path / "cache", (item(number, dtype) for number in range(6))), check=check)
    for _ in range(2):
        found = reader.read([address(number) for number in range(6)])
        for name, feature in FEATURES.items():
            value = torch.stack([sample(number)[name] for number in range(6)])
            assert found[name].dtype == getattr(torch, feature.dtype)
            assert torch.allclose(found[name].float(), value.float(), rtol=0.08, atol=0.02)


@CHECKS
def test_rows_that_were_left_out_are_zeros_in_memory_that_was_not(tmp_path, check):
    rows = [0, 3, 7, 1, 3, 7, 0]
    items = [item(number, rows=kept) for number, kept in enumerate(rows)]
    reader = reader_of(filled(tmp_path / "cache", items), check=check)
    for _ in range(4):
        litter = [
            torch.full((7, 7, 5), 9.0) for _ in range(50)
        ]  # so that what is allocated next is not zeros by chance
        del litter
        found = reader.read([address(number) for number in range(len(rows))])
        assert same(found, [sample(number, rows=kept) for number, kept in enumerate(rows)])


@CHECKS
def test_entries_of_one_size_and_two_shapes_are_not_mistaken(tmp_path, check):
    wide, tall = Bucket(32, 48), Bucket(48, 32)
    items = [item(number, bucket=tall if number % 2 else wide) for number in range(8)]
    assert len({sum(len(bytes(piece)) for piece in each.pieces) for each in items}) == 1
    reader = reader_of(filled(tmp_path / "cache", items), check=check)
    for _ in range(2):
        for number in range(8):
            assert same(reader.read([address(number)]), [sample(number, tall if number % 2 else wide)])
        assert same(reader.read([address(1), address(3)]), [sample(1, tall), sample(3, tall)])
    with pytest.raises(TrainingFault, match=r"map is \(4, 6, 4\), and \(4, 4, 6\) "):
        reader.read([address(0), address(1)])
    assert same(reader.read([address(0)]), [sample(0, wide)])


def test_latents_of_a_video_have_an_axis_more(tmp_path):
    value = torch.randn(3, 5, 2, 4)
    folder = filled(tmp_path / "cache", [PackedEntry(address(0), pack([stored("clip", value, "float8_e4m3fn")], {}))])
    reader = Reader(SegmentFiles(folder), Metadata(folder.database), {"clip": Feature(3)}, None)
    assert torch.allclose(reader.read([address(0)])["clip"][0], value, rtol=1 / 15, atol=0.01)


def test_one_feature_of_several_can_be_read(tmp_path):
    folder = filled(tmp_path / "cache", map(item, range(3)))
    for name in FEATURES:
        reader = Reader(SegmentFiles(folder), Metadata(folder.database), {name: FEATURES[name]}, None)
        assert same(reader.read([address(1), address(2)]), [{name: sample(number)[name]} for number in (1, 2)])


@CHECKS
def test_a_feature_that_an_entry_has_not_got_is_named(tmp_path, check):
    folder = filled(tmp_path / "cache", map(item, range(3)))
    metadata = Metadata(folder.database)
    verified = Verified(Verified.reserve(3), metadata.generation) if check else None
    reader = Reader(SegmentFiles(folder), metadata, {"map": FEATURES["map"], "depth": Feature(1)}, verified)
    with pytest.raises(TrainingFault) as caught:
        reader.read([address(0)])
    assert names(caught.value, "map", "depth")


def test_a_table_longer_than_the_first_look(tmp_path):
    names = [f"feature with a long name {number:02d}" for number in range(20)]
    some = [stored(name, torch.full((3,), float(number)), "float32") for number, name in enumerate(names)]
    folder = filled(tmp_path / "cache", [PackedEntry(address(0), pack(some, {}))])
    reader = Reader(SegmentFiles(folder), Metadata(folder.database), dict.fromkeys(names, Feature(3)), None)
    assert [float(each[0, 0]) for each in reader.read([address(0)]).values()] == list(range(20))


@pytest.mark.parametrize("place", [0, 8, 20, 150, 300, 640, -1], ids=str)
def test_one_wrong_bit_is_found_at_the_first_read(tmp_path, place):
    folder = filled(tmp_path / "cache", map(item, range(4)))
    length = Metadata(folder.database).lookup(address(2)).length
    row = flip(folder, 2, place % length)
    for learned in (False, True):
        reader = reader_of(folder)
        if learned:
            reader.read([address(0), address(1)])  # so that its kind is known, and it is read straight into the batch
        with pytest.raises(TrainingFault) as caught:
            reader.read([address(1), address(2)])
        said = str(caught.value)
        assert re.search(
            rf"segment {row.segment}: .* byte {row.offset:,} \({row.length:,} bytes\) .*damaged: .*checksum", said
        )
        assert f"cache repair {folder.path}`" in said
        if place >= 300:
            assert "is of 'picture 2.jpg'" in said
        assert same(reader.read([address(0), address(3)]), [sample(0), sample(3)]), "what is whole is read still"


def test_a_checksum_is_looked_at_once_a_run_whoever_reads(tmp_path, monkeypatch):
    folder = filled(tmp_path / "cache", map(item, range(3)))
    reader, other = (pickle.loads(pickle.dumps(each)) for each in [reader_of(folder)] * 2)
    reader.read([address(0), address(1)])
    flip(folder, 0)
    other.read([address(0)])  # was checked by the first
    flip(folder, 2)
    with pytest.raises(TrainingFault, match="checksum"):
        other.read([address(2)])
    with pytest.raises(TrainingFault, match="checksum"):
        other.read([address(2)])


def test_after_another_merge_old_marks_mean_nothing(tmp_path):
    folder = filled(tmp_path / "cache", map(item, range(3)))
    old = reader_of(folder)
    old.read([address(number) for number in range(3)])
    filled(tmp_path / "cache", map(item, range(3, 9)))
    flip(folder, 1)
    fresh = pickle.loads(pickle.dumps(old))  # as a worker that starts later
    with pytest.raises(TrainingFault, match="checksum"):
        fresh.read([address(1)])


@CHECKS
def test_a_segment_cut_short_is_named(tmp_path, check):
    folder = filled(tmp_path / "cache", map(item, range(3)))
    row = Metadata(folder.database).lookup(address(2))
    reader = reader_of(folder, check=check)
    reader.read([address(0), address(1)])
    path = folder.file(row.segment, BIN)
    os.truncate(path, row.offset + 400)
    with pytest.raises(TrainingFault, match=rf"segment {row.segment}: .* damaged: .* {row.offset + 400:,}, "):
        reader.read([address(2)])
    assert same(reader.read([address(1)]), [sample(1)])


@CHECKS
def test_a_segment_that_is_gone_is_named(tmp_path, check):
    folder = filled(tmp_path / "cache", map(item, range(3)))
    (segment,) = folder.names()
    folder.file(segment, BIN).unlink()
    with pytest.raises(TrainingFault, match=f"segment {segment}: .* damaged: .*gone.*cache repair"):
        reader_of(folder, check=check).read([address(0)])


def test_a_file_that_went_stale_is_opened_anew_and_a_failing_disk_is_named(tmp_path, monkeypatch):
    reader = reader_of(filled(tmp_path / "cache", map(item, range(3))), check=False)
    reader.read([address(0)])
    read, failures = os.preadv, [116, 0, 5, 5]  # ESTALE once, then EIO for good

    def failing(*args):
        number = failures.pop(0) if failures else 0
        if number:
            raise OSError(number, os.strerror(number))
        return read(*args)

    monkeypatch.setattr(os, "preadv", failing)
    assert same(reader.read([address(1)]), [sample(1)])
    with pytest.raises(TrainingFault, match=r"damaged: .*\(Input/output error\)"):
        reader.read([address(2)])


def test_entries_that_were_moved_while_they_are_read_are_found_again(tmp_path):
    folder = filled(tmp_path / "cache", [*map(item, range(3)), refused(3)])
    reader = reader_of(folder)
    assert same(reader.read([address(0)]), [sample(0)])
    (old,) = folder.names()
    reader = pickle.loads(pickle.dumps(reader))
    assert reader.reject(address(0)) is None  # looks into the index as it is now, and opens no segment
    for suffix in (".bin", ".idx"):
        folder.file(old, suffix).unlink()
    filled(folder.path, [*map(item, range(3)), refused(3)])
    assert same(reader.read([address(1), address(0)]), [sample(1), sample(0)])
    assert reader.reject(address(3)) == "truncated: 3 of 9 bytes"


def test_what_is_missing_is_counted_and_named(tmp_path):
    reader = reader_of(filled(tmp_path / "cache", map(item, range(2))))
    with pytest.raises(TrainingFault) as caught:
        reader.read([address(0), address(7), address(8)])
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'cache'}: 2 of 3 entries ") and "(map, tokens, vector)" in said
    assert address(7).hex() in said and "--trust_cache" in said


@CHECKS
def test_why_there_is_nothing_is_told_and_never_read(tmp_path, check):
    reader = reader_of(filled(tmp_path / "cache", [item(0), refused(1)]), check=check)
    assert (reader.reject(address(0)), reader.reject(address(5))) == (None, None)
    assert reader.reject(address(1)) == "truncated: 3 of 9 bytes"
    with pytest.raises(TrainingFault, match=rf"^{tmp_path / 'cache'}: .*: truncated: 3 of 9 bytes"):
        reader.read([address(0), address(1)])


def test_files_stay_few_and_rows_do_too(tmp_path, monkeypatch):
    monkeypatch.setattr("difftrain.cache.store.segment._OPEN_FILES", 4)
    monkeypatch.setattr(reading, "_REMEMBERED", 5)
    folder = filled(tmp_path / "cache", map(item, range(12)), segment_bytes=1)
    assert len(folder.names()) == 12
    reader = reader_of(folder)
    for _ in range(2):
        for number in range(12):
            assert same(reader.read([address(number)]), [sample(number)])
            opened = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if _is_open(each)]  # noqa: PTH115, PTH208
            assert sum(name.startswith(str(folder.segments)) for name in opened) <= 4
            assert len(reader._remembered) <= 5


def _is_open(number: str) -> bool:
    return Path(f"/proc/self/fd/{number}").is_symlink()


def _read_there(reader: Reader, numbers: list[int], answer) -> None:
    found = reader.read([address(number) for number in numbers])
    answer.put({name: each.float().sum().item() for name, each in found.items()})


@pytest.mark.parametrize("used", [False, True], ids=["before", "after"])
def test_a_forked_worker_reads_too(tmp_path, used):
    """Opened before the fork or after it: no file or database handle of the parent is shared in a way that hurts."""
    reader = reader_of(filled(tmp_path / "cache", map(item, range(20)), segment_bytes=3000))
    if used:
        reader.read([address(0), address(1)])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [context.Process(target=_read_there, args=(reader, [number, 19], answers)) for number in range(6)]
    for worker in workers:
        worker.start()
    for number in range(20):  # the parent goes on at the same time
        assert same(reader.read([address(number)]), [sample(number)])
    found = [answers.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    wanted = [
        {name: torch.stack([sample(n)[name], sample(19)[name]]).float().sum().item() for name in FEATURES}
        for n in range(6)
    ]
    assert sorted(map(str, found)) == sorted(map(str, wanted))


class Same:
    """Stand in for an index: every address lies somewhere in one large file."""

    generation = "one"

    def __init__(self, path: Path, crc: int, length: int, step: int) -> None:
        self.path, self.crc, self.length, self.step = str(path), crc, length, step

    def lookup(self, wanted: bytes) -> EntryRow:
        number = int.from_bytes(wanted, "big")
        return EntryRow(number, self.path, number * self.step, self.length, self.crc, 0)


def resident() -> int:
    """Return the bytes of memory of this process that are resident, pages of mapped files with them."""
    words = Path("/proc/self/status").read_text()
    (found,) = re.findall(r"^VmRSS:\s+(\d+) kB", words, re.MULTILINE)
    return int(found) << 10


@CHECKS
def test_resident_memory_does_not_grow_with_what_is_read(check):
    """1.5 GiB pass through 2 MiB at a time: in the first reads, which look at checksums, and in those after them."""
    step, count, values = 2 << 20, 768, (1 << 19) - 256
    entry = b"".join(bytes(piece) for piece in pack([stored("wide", torch.zeros(values), "float32")], {}))
    path = Path(reserve(step * count))  # a hole but for the tables
    with path.open("r+b") as file:
        for number in range(count):
            file.seek(number * step)
            file.write(entry[:512])
    entries = Same(path, crc32c(entry), len(entry), step)
    verified = Verified(Verified.reserve(count), "one") if check else None
    reader = Reader(SegmentFiles(None), entries, {"wide": Feature(values)}, verified)
    order = random.Random(0).sample(range(count), count)
    reader.read([order[0].to_bytes(16, "big")])
    before = most = resident()
    for number in (*order, *range(0, count, 7)):
        reader.read([number.to_bytes(16, "big")])
        most = max(most, resident())
    assert most - before < 24 << 20


def test_merging_twice_changes_nothing_for_a_reader(tmp_path):
    folder = filled(tmp_path / "cache", map(item, range(3)))
    reader = reader_of(folder)
    merge(folder)
    assert same(reader.read([address(2), address(0)]), [sample(2), sample(0)])
    assert reader.read([address(0)])["map"].shape == (1, *FEATURES["map"].shape(BUCKET))
