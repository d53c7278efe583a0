"""The index of the feature cache: always equal to what the journals say, whatever happened to it before."""

import json
import os
import re
import signal
import tempfile
import time
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import HEADER, address, check, entries, item, payload, write

from difftrain.cache.store import compaction, journals, references
from difftrain.cache.store.folder import BIN, IDX, CacheFolder, clean
from difftrain.cache.store.format import header_block, reject
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.store.segment import SegmentWriter
from difftrain.contracts import DataFault, TrainingFault


@pytest.fixture
def folder(tmp_path):
    return CacheFolder.open(tmp_path / "cache", create=True)


def rebuilt(folder):
    """Return all entries of an index that is made from nothing."""
    path = folder.path / "anew.db"
    path.unlink(missing_ok=True)
    merge(folder, path)
    return entries(path)


def asked(numbers):
    return np.frombuffer(b"".join(address(number) for number in numbers), "V16")


def test_a_cache_without_segments_has_an_index(folder):
    merged = merge(folder)
    assert (merged.entries, merged.segments, merged.changed, merged.rebuilt) == (0, 0, True, "")
    assert Metadata(folder.database).count == 0 and Metadata(folder.database).lookup(address(0)) is None
    assert Metadata(folder.database).has_many(asked([0, 1])).tolist() == [False, False]
    assert Metadata(folder.database).has_many(asked([])).tolist() == []


def test_what_is_new_is_added_and_nothing_is_written_for_nothing(folder):
    writer = write(folder, range(10), seal=False)
    assert (merge(folder).added, merge(folder).changed) == (10, False)
    before = folder.database.stat()
    writer.append([item(10), item(11)])
    write(folder, range(12, 20), segment_bytes=3000)
    merged = merge(folder)
    assert (merged.entries, merged.added, merged.changed, merged.rebuilt, merged.notes) == (20, 10, True, "", ())
    check(folder, range(20))
    assert folder.database.stat().st_ino != before.st_ino, "the old file is left as it was for those who read it"
    assert merge(folder).changed is False
    assert not list(folder.path.glob(".*.tmp"))


class Actions:
    """Do what several launches may do, in any order."""

    def __init__(self, folder):
        self.folder, self.writers = folder, [None, None, None]

    def append(self, launch, numbers):
        if self.writers[launch] is None:
            self.writers[launch] = SegmentWriter(self.folder, HEADER, segment_bytes=4000)
        self.writers[launch].append([item(number) for number in numbers])

    def end(self, launch):
        if self.writers[launch] is not None:
            self.writers[launch].close()
        self.writers[launch] = None

    def drop(self, numbers):
        there = entries(self.folder.database) if self.folder.database.exists() else {}
        references.add(self.folder, [there[address(n)][:2] for n in numbers if address(n) in there])

    def gone(self, place):
        names = [name for name in self.folder.names() if self.folder.sealed(name)]
        if names:
            for suffix in (BIN, IDX):
                self.folder.file(names[place % len(names)], suffix).unlink()


numbers = st.lists(st.integers(0, 25), min_size=1, max_size=5, unique=True)
actions = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 2), numbers),
    st.tuples(st.just("append"), st.integers(0, 2), numbers),
    st.tuples(st.just("end"), st.integers(0, 2)),
    st.tuples(st.just("drop"), numbers),
    st.tuples(st.just("gone"), st.integers(0, 5)),
    st.tuples(st.just("merge")),
)


@given(st.lists(actions, max_size=25))
@settings(max_examples=12, deadline=None)
def test_step_by_step_equals_all_at_once(tmp_path_factory, steps):
    folder = CacheFolder.open(tmp_path_factory.mktemp("cache"), create=True)
    doing = Actions(folder)
    for name, *rest in steps:
        if name == "merge":
            merge(folder)
        else:
            getattr(doing, name)(*rest)
    merge(folder)
    there = entries(folder.database)
    assert there == rebuilt(folder)
    check(folder, [number for number in range(26) if address(number) in there])


@pytest.mark.parametrize("at_once", [True, False])
def test_of_equal_addresses_the_smallest_place_counts(folder, at_once):
    for start in range(3):
        write(folder, range(start, start + 8))
        if not at_once:
            merge(folder)
    assert merge(folder).entries == 10
    found = entries(folder.database)
    for number in range(10):
        holders = [name for name in folder.names() if address(number) in journal_addresses(folder, name)]
        assert found[address(number)][0] == min(holders)
    check(folder, range(10))


def journal_addresses(folder, name):
    return [each for rows, _ in journals.Journal(folder, name).rows() for each in rows["address"].tolist()]


def test_an_equal_address_twice_in_one_segment_counts_once(folder):
    writer = SegmentWriter(folder, HEADER)
    writer.append([item(0), item(1), item(0)])
    merge(folder)
    writer.append([item(1)])
    merge(folder)
    check(folder, [0, 1])
    assert entries(folder.database) == rebuilt(folder)


def test_a_drop_brings_back_the_next_equal_entry(folder):
    write(folder, range(4))
    write(folder, range(4))
    merge(folder)
    first = entries(folder.database)
    references.add(folder, [first[address(2)][:2]])
    merged = merge(folder)
    assert merged.entries == 4 and "changed" in merged.rebuilt
    second = entries(folder.database)
    assert second[address(2)][0] == max(folder.names()) and second[address(1)] == first[address(1)]
    references.add(folder, [second[address(2)][:2]])
    assert merge(folder).added == -1
    check(folder, [0, 1, 3])
    write(folder, [2])
    merge(folder)
    check(folder, range(4))


def test_addresses_that_begin_alike_are_told_apart(folder, monkeypatch):
    from difftrain.cache.store.format import PackedEntry

    same = [b"\xff" * 8 + bytes([number]) * 8 for number in range(250)] + [b"\0" * 16, b"\xff" * 16]
    writer = SegmentWriter(folder, HEADER)
    writer.append([PackedEntry(each, [each]) for each in same[::2]])
    monkeypatch.setattr(journals, "RUN_ROWS", 16)
    merge(folder)
    writer.append([PackedEntry(each, [each]) for each in same[1::2]])
    merge(folder)
    metadata = Metadata(folder.database)
    assert set(entries(folder.database)) == set(same) and entries(folder.database) == rebuilt(folder)
    others = [b"\xff" * 8 + bytes([9]) * 7 + b"\x01", b"\xff" * 8 + bytes(7) + b"\x01", b"\1" * 16]
    for chunk in (1, 7, 1000):
        monkeypatch.setattr("difftrain.cache.store.index._FETCHED", chunk)
        found = metadata.has_many(np.frombuffer(b"".join(same + others), "V16"))
        assert found.tolist() == [True] * len(same) + [False] * len(others)


def test_many_runs_are_merged_as_one(folder, monkeypatch):
    write(folder, range(300), batch=10, segment_bytes=20_000)
    write(folder, range(150, 400), batch=10, segment_bytes=20_000)
    whole = rebuilt(folder)
    monkeypatch.setattr(journals, "RUN_ROWS", 64)
    monkeypatch.setattr(compaction, "_CHUNK", 50)
    assert rebuilt(folder) == whole and len(whole) == 400
    merge(folder)
    check(folder, range(400))


@pytest.mark.parametrize("count", [1, 30, 399])
def test_presence_of_many(folder, count):
    write(folder, range(0, 800, 2), batch=100)
    merge(folder)
    metadata = Metadata(folder.database)
    wanted = np.random.default_rng(count).integers(0, 800, count).tolist()
    expected = [number % 2 == 0 for number in wanted]
    assert metadata.has_many(asked(wanted)).tolist() == expected
    assert metadata.has_many(asked(wanted).view(np.uint8).reshape(-1, 16)).tolist() == expected
    assert [row is not None for row in metadata.rows(asked(wanted))] == expected


# --- damage ---


def spoil(path, how):
    content = bytearray(path.read_bytes())
    if how == "empty":
        content = b""
    elif how == "text":
        content = b"not a database" * 500
    elif how == "cut":
        del content[len(content) // 2 :]
    elif how == "end":
        del content[-1:]
    elif how == "more":
        content += b"more"
    elif how == "version":
        content[63] = 99
    elif how == "page":
        content[4096 * 4 : 4096 * 5] = bytes(4096)
    elif how == "bit":
        content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["empty", "text", "cut", "end", "more", "version", "page", "bit"])
def test_a_damaged_or_other_index_is_made_anew_and_that_is_said(folder, how):
    write(folder, range(200), batch=50)
    merge(folder)
    spoil(folder.database, how)
    with pytest.raises(journals.OtherFormat if how == "version" else journals.Damaged):
        journals.check(folder.database)
    write(folder, range(200, 210))  # something is new, so that all of it is read
    merged = merge(folder)
    said = "version 99, .*version 1" if how == "version" else "damaged"
    assert re.search(said, merged.rebuilt) and merged.entries == 210
    journals.check(folder.database)
    check(folder, range(210))


@pytest.mark.parametrize("how", ["empty", "text", "cut", "end", "more", "version"])
def test_a_damaged_or_other_index_is_not_read(folder, how):
    write(folder, range(20))
    merge(folder)
    spoil(folder.database, how)
    with pytest.raises(DataFault, match=rf"^{folder.database}, "):
        Metadata(folder.database).lookup(address(1))


def test_an_index_that_is_not_there_is_named(folder):
    with pytest.raises(DataFault, match=r"metadata\.db is .*there"):
        _ = Metadata(folder.database).count


def test_a_segment_of_another_version_is_named_and_left_alone(folder):
    write(folder, range(4))
    name = f"seg-{'0' * 32}-000000"
    block = bytearray(header_block({"segment": name}))
    block[16] = 2
    for suffix in (BIN, IDX):
        (folder.segments / f"{name}{suffix}").write_bytes(block)
    merged = merge(folder)
    [note] = merged.notes
    assert merged.entries == 4 and re.match(rf"segment {name}: .*format 2, .*format 1; ", note)
    assert merge(folder).notes == (note,), "as long as it is there"
    assert (folder.segments / f"{name}{BIN}").read_bytes() == block


@pytest.mark.parametrize("size", [0, 10, 40])
def test_a_segment_whose_writer_was_killed_at_its_beginning_is_nothing(folder, size):
    write(folder, range(4))
    name = f"seg-{'f' * 32}-000000"
    (folder.segments / f"{name}{BIN}.part").write_bytes(b"")
    (folder.segments / f"{name}{IDX}.part").write_bytes(header_block({"segment": name})[:size])
    merged = merge(folder)
    assert (merged.entries, merged.notes) == (4, ())


def test_a_segment_that_goes_takes_its_entries_with_it(folder):
    write(folder, range(8))
    write(folder, range(4, 12))
    merge(folder)
    first = folder.names()[0]
    kept = range(4, 12) if 0 in holds(folder, first) else range(8)
    for suffix in (BIN, IDX):
        folder.file(first, suffix).unlink()
    merged = merge(folder)
    assert merged.rebuilt == f"segment {first} is gone"
    check(folder, kept)


def holds(folder, name):
    there = journal_addresses(folder, name)
    return {number for number in range(20) if address(number) in there}


def test_payloads_that_are_gone_are_said_and_do_not_count(folder):
    write(folder, range(4))
    merge(folder)
    write(folder, range(4, 8))
    (gone,) = [name for name in folder.names() if 4 in holds(folder, name)]
    folder.file(gone, BIN).unlink()
    merged = merge(folder)
    assert len(merged.notes) == 1 and re.match(rf"segment {gone}: .*payloads .*gone, ", merged.notes[0])
    check(folder, range(4))


def test_what_could_not_be_encoded_is_listed(folder):
    assert not folder.rejects.exists()
    writer = write(folder, range(3), seal=False)
    writer.append([reject(b"b" * 16, "späti.jpg", "cut short"), reject(b"a" * 16, "a.jpg", 'not a "picture"\n')])
    merged = merge(folder)
    lines = [json.loads(line) for line in folder.rejects.read_text(encoding="utf-8").splitlines()]
    said = [{"path": "a.jpg", "reason": 'not a "picture"\n'}, {"path": "späti.jpg", "reason": "cut short"}]
    assert (merged.entries, merged.rejects, lines) == (5, 2, said)
    assert sorted(Metadata(folder.database).rejects()) == [b"a" * 16, b"b" * 16]
    references.add(folder, [entries(folder.database)[b"a" * 16][:2]])
    merge(folder)
    assert [json.loads(line) for line in folder.rejects.read_text(encoding="utf-8").splitlines()] == said[1:]
    references.add(folder, [entries(folder.database)[b"b" * 16][:2]])
    assert (merge(folder).rejects, folder.rejects.read_text()) == (0, "")


# --- several processes ---


def run(target, *args, user=None):
    """Run something in a forked process; return its exit code."""

    def body():
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        target(*args)

    process = get_context("fork").Process(target=body)
    process.start()
    process.join()
    return process.exitcode


def test_who_has_an_index_open_keeps_it_while_another_takes_its_name(folder):
    writer = write(folder, range(50), seal=False)
    merge(folder)
    reader = Metadata(folder.database)
    rows = [reader.lookup(address(number)) for number in range(50)]
    for start in range(50, 80, 10):
        writer.append([item(number) for number in range(start, start + 10)])
        merge(folder)
        assert [reader.lookup(address(number)) for number in range(50)] == rows
        assert reader.lookup(address(start)) is None and reader.has_many(asked(range(80))).sum() == 50
    assert Metadata(folder.database).count == 80
    now = [Metadata(folder.database).lookup(address(number)) for number in range(50)]
    assert now == rows, "entries keep their numbers, so bits of a bitmap keep their meaning"


def test_an_index_is_opened_anew_after_a_fork(folder):
    write(folder, range(5))
    merge(folder)
    reader = Metadata(folder.database)
    assert reader.lookup(address(1))
    mine = reader._connection

    def child():
        assert reader.lookup(address(2)) and reader._connection is not mine

    assert run(child) == 0


def test_two_merges_at_once_lose_nothing(folder, monkeypatch):
    write(folder, range(10))
    real = compaction._build
    others = []

    def slow(*args):
        made = real(*args)
        if not others:  # another process merges more between reading the journals and the new name
            others.append(True)
            write(folder, range(10, 20))
            merge(folder)
        return made

    monkeypatch.setattr(compaction, "_build", slow)
    assert merge(folder).entries == 20
    check(folder, range(20))
    assert not list(folder.path.glob(".*.tmp"))


def test_a_merge_killed_at_any_moment_leaves_an_index(folder):
    writer = write(folder, range(100), batch=50, seal=False)
    merge(folder)
    chance = np.random.default_rng(1)
    context = get_context("fork")
    complete = 0
    for number in range(100, 112):
        writer.append([item(number)])
        process = context.Process(target=merge, args=(folder,))
        process.start()
        time.sleep(float(chance.uniform(0, 0.03)))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        journals.check(folder.database)
        count = Metadata(folder.database).count
        assert 100 <= count <= number + 1
        complete += count == number + 1
    merge(folder)
    check(folder, range(112))
    clean(folder.path, older_s=-1)
    assert not list(folder.path.glob(".*.tmp"))


def test_writers_and_merges_in_many_processes(folder):
    context = get_context("fork")

    def launch(start):
        writer = SegmentWriter(folder, HEADER, segment_bytes=5000)
        for number in range(start, start + 40, 4):
            writer.append([item(n) for n in range(number, number + 4)])
            merge(folder)
        writer.close()

    processes = [context.Process(target=launch, args=(start,)) for start in (0, 20, 40)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    merge(folder)
    check(folder, range(80))
    assert entries(folder.database) == rebuilt(folder)


# --- places that cannot be written, clocks that are wrong ---


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user to whom the folder is read-only")
def test_a_read_only_cache_is_read_and_what_cannot_be_written_is_said(tmp_path_factory):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        folder = CacheFolder.open(Path(scratch) / "cache", create=True)
        writer = write(folder, range(5), seal=False)
        merge(folder)

        def reads():
            assert not CacheFolder.open(folder.path, create=True).writable
            assert (merge(folder).entries, merge(folder).changed) == (5, False)
            check(folder, range(5))

        def misses():
            with pytest.raises(TrainingFault, match=rf"^{folder.path}: .*--cache_dir"):
                merge(folder)
            check(folder, range(5))
            with tempfile.TemporaryDirectory() as mine:
                private = Path(mine) / "metadata.db"
                assert merge(folder, private).entries == 7
                check(folder, range(7), private)

        assert run(reads, user=65534) == 0
        writer.append([item(5), item(6)])
        assert run(misses, user=65534) == 0
        assert folder.writable


@pytest.mark.parametrize("skew", [-2e9, 2e9])
def test_wrong_clocks_change_nothing(folder, skew):
    writer = write(folder, range(5), seal=False)
    write(folder, range(5, 10))
    merge(folder)
    now = time.time()
    for path in folder.path.rglob("*"):
        os.utime(path, (max(0, now + skew),) * 2)
    writer.append([item(20)])
    os.utime(folder.file(folder.names()[0], IDX), (max(0, now + skew),) * 2)
    assert merge(folder).entries == 11
    check(folder, [*range(10), 20])
    os.utime(folder.database, (max(0, now + skew),) * 2)
    assert merge(folder).changed is False


def test_leftovers_of_the_killed_go_after_a_day_those_of_the_living_stay(folder):
    old, young = folder.path / "metadata.db.tmp-1", folder.path / "metadata.db.tmp-2"
    old.write_text(""), young.write_text("")
    os.utime(old, (time.time() - 90_000,) * 2)
    write(folder, [0])
    merge(folder)
    assert not old.exists() and young.exists()


def test_no_room_for_building_the_index_is_said_and_the_old_one_stays(folder, monkeypatch):
    write(folder, range(10))
    merge(folder)
    write(folder, range(10, 5000), batch=500)
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(TrainingFault, match=rf"^{tempfile.gettempdir()}: .*TMPDIR"):
            merge(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check(folder, range(10))
    assert merge(folder).entries == 5000


def test_no_room_for_the_new_index_is_said_and_the_old_one_stays(folder, monkeypatch):
    write(folder, range(10))
    merge(folder)
    write(folder, range(10, 20))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(TrainingFault, match=r"No space .*on device"):
            merge(folder)
    check(folder, range(10))
    assert not list(folder.path.glob(".*.tmp"))
    assert payload(3) and merge(folder).entries == 20
