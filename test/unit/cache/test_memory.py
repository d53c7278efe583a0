"""Entries in memory: shared by all processes of a machine, found by address, copied from a cache when that is asked for."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
from entries import FEATURES, address, filled, item, read_and_mark, refused, same, sample

from difftrain.cache.store import memory as preloading
from difftrain.cache.store.folder import BIN
from difftrain.cache.store.format import PackedEntry
from difftrain.cache.store.index import Metadata
from difftrain.cache.store.memory import MemoryEntries, MemoryRows, MemorySink, Verified, preload, reserve
from difftrain.cache.store.read import Reader
from difftrain.cache.store.segment import SegmentFiles
from difftrain.contracts import ConfigFault, TrainingFault


def addresses(numbers) -> np.ndarray:
    """Return addresses as an array."""
    return np.array([address(number) for number in numbers], dtype="V16")


def reader_of(table: str) -> Reader:
    """Return what reads entries in memory."""
    return Reader(SegmentFiles(None), MemoryEntries(table), FEATURES, None, cache="memory")


def written(numbers, segment_bytes: int = 1 << 20) -> MemoryRows:
    """Put entries into memory as one rank would, and say where they lie."""
    sink = MemorySink(segment_bytes=segment_bytes)
    numbers = list(numbers)
    for start in range(0, len(numbers), 4):
        sink.append([item(number) for number in numbers[start : start + 4]])
    sink.close()
    assert sink.written == len(numbers)
    return sink.rows()


def test_what_two_ranks_made_is_read_by_both():
    shares = [pickle.loads(pickle.dumps(written(range(start, 20, 2), segment_bytes=4000))) for start in (0, 1)]
    assert all(len(share.paths) > 2 for share in shares)
    reader = pickle.loads(pickle.dumps(reader_of(MemoryEntries.reserve(shares))))
    for _ in range(2):
        for numbers in ([3, 0, 19], [7], list(range(20))):
            assert same(reader.read([address(number) for number in numbers]), [sample(number) for number in numbers])
    with pytest.raises(TrainingFault, match=rf"memory: 1 of 2 entries .*{address(20).hex()}.*--trust_cache"):
        reader.read([address(0), address(20)])


def test_of_equal_addresses_the_first_counts():
    first, second = written([1, 2]), written([2, 3])
    entries = MemoryEntries(MemoryEntries.reserve([first, second]))
    assert entries.count == 3
    assert entries.lookup(address(2)).segment == first.paths[0]
    assert [entries.lookup(address(number)).number for number in (1, 2, 3)] != [0, 0, 0]


def test_the_table_is_searched_as_a_dictionary_would_be():
    made = written(range(200))
    entries = MemoryEntries(MemoryEntries.reserve([made]))
    asked = addresses([*range(190, 210), 5])
    assert entries.has_many(asked).tolist() == [True] * 10 + [False] * 10 + [True]
    assert sorted(entries.lookup(address(number)).number for number in range(200)) == list(range(200))
    assert entries.lookup(address(200)) is None and entries.lookup(b"\xff" * 16) is None


def test_addresses_that_begin_alike_are_told_apart():
    sink = MemorySink()
    alike = [b"\x05" * 8 + bytes([number]) * 8 for number in (9, 3, 200, 0)]
    sink.append([PackedEntry(each, [bytes([number]) * 10]) for number, each in enumerate(alike)])
    entries = MemoryEntries(MemoryEntries.reserve([sink.rows()]))
    assert [entries.lookup(each).offset for each in alike] == [0, 64, 128, 192]
    assert entries.lookup(b"\x05" * 8 + b"\x04" * 8) is None
    asked = np.array([*alike, b"\x05" * 8 + b"\x04" * 8], dtype="V16")
    assert entries.has_many(asked).tolist() == [True] * 4 + [False]


def test_nothing_was_made():
    entries = MemoryEntries(MemoryEntries.reserve([MemorySink().rows()]))
    assert (entries.count, entries.lookup(address(0)), entries.rejects()) == (0, None, [])
    assert entries.has_many(addresses([1, 2])).tolist() == [False, False]


def test_rejects_are_kept():
    sink = MemorySink()
    sink.append([item(0), refused(1)])
    table = MemoryEntries.reserve([sink.rows()])
    assert MemoryEntries(table).rejects() == [address(1)]
    reader = reader_of(table)
    assert (reader.reject(address(0)), reader.reject(address(1))) == (None, "truncated: 3 of 9 bytes")
    with pytest.raises(TrainingFault, match=r"memory: .*: truncated: 3 of 9 bytes"):
        reader.read([address(1)])


def test_a_forked_process_reads_and_marks_what_is_shared():
    verified = Verified(Verified.reserve(40), "one")
    verified.add(39)
    reader = reader_of(MemoryEntries.reserve([written(range(4))]))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    worker = context.Process(target=read_and_mark, args=(reader, [2, 3], verified, [0, 7, 8], answers))
    worker.start()
    seen, total = answers.get(timeout=60)
    worker.join(60)
    assert seen == [0, 7, 8, 39] == [number for number in range(40) if verified.has(number)]
    assert total == pytest.approx(float((sample(2)["map"] + sample(3)["map"]).sum()), abs=1e-4)


def test_memory_that_is_full_is_said(monkeypatch):
    sink = MemorySink()
    sink.append([item(0)])

    class Full:
        def seek(self, place):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sink, "_file", Full())
    with pytest.raises(TrainingFault, match=r"\(No space .*on device\).*--cache_latents_to_disk"):
        sink.append([item(1)])


def test_preloading_copies_what_is_wanted_in_the_order_in_which_it_lies(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(preloading, "_AT_ONCE", 3000)
    folder = filled(tmp_path / "cache", [*map(item, range(12)), refused(12)], segment_bytes=5000)
    asked: list[tuple[str, int, int]] = []

    class Watched(SegmentFiles):
        def want(self, ranges):
            assert len(ranges) == 1 or sum(length for *_, length in ranges) <= 3000
            asked.extend(ranges)

    wanted = [9, 3, 3, 12, 0, 40]
    caplog.set_level("INFO")
    monkeypatch.setattr(preloading, "_SAY_EVERY_S", 0.0)
    table = preload(Metadata(folder.database), Watched(folder), addresses(wanted), None, "CACHE")
    assert [(segment, offset) for segment, offset, _ in asked] == sorted((s, o) for s, o, _ in asked)
    assert MemoryEntries(table).count == len(asked) == 4
    assert "4 entries" in caplog.messages[0] and "of 4 entries" in caplog.messages[-1]
    for path in folder.segments.iterdir():
        path.unlink()
    reader = reader_of(table)
    assert same(reader.read([address(9), address(0)]), [sample(9), sample(0)])
    assert reader.reject(address(12)) == "truncated: 3 of 9 bytes"
    with pytest.raises(TrainingFault, match=f"memory: 1 of 1 entries .*{address(1).hex()}"):
        reader.read([address(1)])


def test_preloading_nothing(tmp_path):
    folder = filled(tmp_path / "cache", map(item, range(2)))
    assert (
        MemoryEntries(preload(Metadata(folder.database), SegmentFiles(folder), addresses([7]), 0, "CACHE")).count == 0
    )


def test_what_does_not_fit_is_not_preloaded(tmp_path):
    folder = filled(tmp_path / "cache", map(item, range(8)))
    metadata = Metadata(folder.database)
    size = 8 * -(-metadata.lookup(address(0)).length // 64) * 64
    preload(metadata, SegmentFiles(folder), addresses(range(8)), size, "CACHE")
    with pytest.raises(ConfigFault, match=r"--cache_preload: .* GiB .* GiB .*free"):
        preload(metadata, SegmentFiles(folder), addresses(range(8)), size - 1, "CACHE")


@pytest.mark.parametrize("hurt", ["bit", "cut", "gone"])
def test_what_is_damaged_is_not_preloaded(tmp_path, hurt):
    folder = filled(tmp_path / "cache", map(item, range(3)))
    row = Metadata(folder.database).lookup(address(1))
    path = folder.file(row.segment, BIN)
    if hurt == "bit":
        content = bytearray(path.read_bytes())
        content[row.offset + 400] ^= 1
        path.write_bytes(content)
    elif hurt == "cut":
        path.write_bytes(path.read_bytes()[: row.offset + 10])
    else:
        path.unlink()
    with pytest.raises(TrainingFault, match=f"CACHE: segment {row.segment}: .* damaged: .*cache repair CACHE"):
        preload(Metadata(folder.database), SegmentFiles(folder), addresses(range(3)), None, "CACHE")


def test_a_block_is_as_large_as_was_asked_and_full_of_zeros():
    path = Path(reserve(1000))
    assert path.read_bytes() == bytes(1000)
