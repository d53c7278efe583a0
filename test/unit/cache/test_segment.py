"""Segments: what an append has returned from stays, whatever happens to the process or the disk."""

import errno
import os
import pickle
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import raised_by
from segments import HEADER, address, check, entries, item, payload, write

from difftrain.cache.store import segment as writing
from difftrain.cache.store.folder import BIN, IDX, CacheFolder
from difftrain.cache.store.format import ROW, read_header
from difftrain.cache.store.index import merge
from difftrain.cache.store.journals import Journal
from difftrain.cache.store.segment import SegmentWriter
from difftrain.contracts import DataFault, TrainingFault
from difftrain.io.process import this_process


@pytest.fixture
def folder(tmp_path):
    return CacheFolder.open(tmp_path / "cache", create=True)


def listing(folder):
    return sorted(path.name for path in folder.segments.iterdir())


def test_nothing_of_it_loads_torch():
    modules = ["format", "segment", "folder", "index", "compaction", "journals", "references"]
    code = "; ".join(f"import difftrain.cache.store.{name}" for name in modules)
    code += "; import sys; print('torch' in sys.modules)"
    library = str(Path(__file__).parents[3] / "library")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONPATH": library})
    assert done.stdout.split() == [b"False"], done.stderr


def test_an_append_is_there_at_once_and_to_stay(folder):
    writer = SegmentWriter(folder, HEADER)
    assert listing(folder) == [], "files are made when there is something to write"
    writer.append([])
    assert listing(folder) == []
    writer.append([item(0), item(1)])
    assert writer.written == 2
    assert merge(folder).entries == 2
    check(folder, [0, 1])
    (name,) = folder.names()
    assert listing(folder) == [f"{name}.bin.part", f"{name}.idx.part"] and not folder.sealed(name)
    writer.append([item(2)])
    writer.close()
    writer.close()
    assert listing(folder) == [f"{name}.bin", f"{name}.idx"] and folder.sealed(name)
    merge(folder)
    check(folder, range(3))


def test_both_files_begin_with_what_the_entries_are(folder):
    write(folder, [0])
    (name,) = folder.names()
    facts = [read_header(folder.file(name, suffix).read_bytes())[0] for suffix in (BIN, IDX)]
    assert facts == [{"format": 1, "segment": name, **HEADER, "writer": this_process()}] * 2


def test_a_full_segment_is_sealed_and_the_next_begun(folder):
    write(folder, range(40), batch=4, segment_bytes=10_000)
    names = folder.names()
    assert len(names) > 3 and len({name.rsplit("-", 1)[0] for name in names}) == 1
    assert all(folder.sealed(name) for name in names)
    assert all(folder.file(name, BIN).stat().st_size < 10_000 + 64 for name in names)
    assert names == sorted(names, key=lambda name: int(name.rsplit("-", 1)[1]))
    merge(folder)
    check(folder, range(40))


def test_a_commit_larger_than_a_segment_is_one_segment(folder):
    write(folder, range(9), batch=3, segment_bytes=10)
    assert len(folder.names()) == 3
    merge(folder)
    check(folder, range(9))


def test_many_pieces_and_an_empty_payload(folder):
    from difftrain.cache.store.format import PackedEntry

    pieces = [bytes([number % 251]) * (number % 7) for number in range(3000)]
    writer = SegmentWriter(folder, HEADER)
    writer.append([PackedEntry(b"a" * 16, pieces), PackedEntry(b"b" * 16, []), PackedEntry(b"c" * 16, [b"end"])])
    writer.close()
    merge(folder)
    found = entries(folder.database)
    content = folder.file(folder.names()[0], BIN).read_bytes()
    for name, wanted in (("a", b"".join(pieces)), ("b", b""), ("c", b"end")):
        _, offset, length, _, _ = found[name.encode() * 16]
        assert content[offset : offset + length] == wanted


@pytest.mark.parametrize("sealed", [False, True])
def test_a_journal_cut_at_any_byte_tells_the_truth_about_what_is_before(folder, sealed):
    write(folder, range(6), batch=2, seal=False)
    (name,) = folder.names()
    journal = folder.file(name, IDX)
    whole, (_, first) = journal.read_bytes(), read_header(journal.read_bytes())
    if sealed:
        for suffix in (BIN, IDX):
            folder.file(name, suffix).rename(folder.segments / f"{name}{suffix}")
        journal = folder.file(name, IDX)
    for size in range(len(whole) + 1):
        journal.write_bytes(whole[:size])
        rows = max(0, size - first) // ROW.itemsize
        if size >= first:
            found = [row for some, _ in Journal(folder, name).rows() for row in some["address"].tolist()]
            assert found == [address(number) for number in range(rows)], size
        if size % 97 == 0 or size == len(whole):
            database = folder.path / f"cut-{size}.db"
            merged = merge(folder, database)
            check(folder, range(rows), database)
            assert bool(merged.notes) == (sealed and rows < 6), (size, merged.notes)


@pytest.mark.parametrize("tail", [b"\0" * 48, b"\0" * 5, b"\xff" * 96, os.urandom(1000)])
def test_what_a_power_cut_leaves_behind_the_last_row_is_no_entry(folder, tail):
    write(folder, range(5), seal=False)
    with folder.file(folder.names()[0], IDX).open("ab") as file:
        file.write(tail)
    merged = merge(folder)
    assert (merged.entries, merged.notes) == (5, ())
    check(folder, range(5))


def test_a_damaged_row_of_a_sealed_journal_loses_only_itself(folder):
    write(folder, range(8))
    (name,) = folder.names()
    journal = folder.file(name, IDX)
    content = bytearray(journal.read_bytes())
    content[read_header(bytes(content))[1] + 3 * ROW.itemsize + 20] ^= 1
    journal.write_bytes(content)
    merged = merge(folder)
    assert len(merged.notes) == 1 and merged.notes[0].startswith(f"segment {name}: 1 damaged rows ")
    check(folder, set(range(8)) - {3})


def test_payloads_cut_short_are_said(folder):
    write(folder, range(4))
    (name,) = folder.names()
    path = folder.file(name, BIN)
    os.truncate(path, path.stat().st_size - 100)
    assert re.match(rf"segment {name}: .*payloads .* cut", merge(folder).notes[0])


class Full:
    """A disk that takes so many bytes of writing and no more."""

    def __init__(self, room, monkeypatch):
        self.room, self.real = room, os.writev
        monkeypatch.setattr(writing.os, "writev", self)

    def __call__(self, descriptor, views):
        taken = b"".join(bytes(view) for view in views)[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(taken)
        return self.real(descriptor, [taken])


@pytest.mark.parametrize("less", [2848, 2847, 2000, 289, 288, 287, 49, 48, 47, 1])
def test_a_disk_that_fills_in_the_middle_keeps_what_was_committed(folder, monkeypatch, less):
    writer = SegmentWriter(folder, HEADER)
    writer.append([item(0), item(1)])
    size = sum(len(payload(number)) + -len(payload(number)) % 64 for number in range(2, 8)) + 6 * ROW.itemsize
    assert size == 2848, "what the rooms above are chosen for: none at all, up to a byte too little"
    with monkeypatch.context() as patched:
        Full(size - less, patched)
        with pytest.raises(TrainingFault, match=r"cache: .*No space .*on device.*--cache_dir") as said:
            writer.append([item(number) for number in range(2, 8)])
        assert str(folder.path) in str(said.value)
    with pytest.raises(TrainingFault, match=rf"^{folder.path}: ") as said:
        writer.append([item(9)])
    assert raised_by(said, "append")
    writer.close()
    assert merge(folder).entries == 2
    check(folder, [0, 1])
    name = folder.names()[0]
    assert len(folder.file(name, BIN).read_bytes()) < 1500, "the room of what was not committed is given back"
    write(folder, range(2, 8))
    merge(folder)
    check(folder, range(8))


def test_a_real_limit_of_the_kernel_in_mid_segment(folder):
    writer = SegmentWriter(folder, HEADER)
    writer.append([item(0, 20_000)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(TrainingFault, match="File too large"):
            writer.append([item(1, 20_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    merged = merge(folder)
    assert merged.entries == 1 and address(0) in entries(folder.database)


def test_a_disk_that_is_full_at_the_first_write_leaves_no_harm(folder, monkeypatch):
    with monkeypatch.context() as patched:
        Full(10, patched)
        with pytest.raises(TrainingFault, match="No space left"):
            write(folder, [0])
    assert (merge(folder).entries, merge(folder).notes) == (0, ())


def test_a_write_is_not_committed_when_the_disk_fails_to_keep_it(folder, monkeypatch):
    writer = SegmentWriter(folder, HEADER)
    writer.append([item(0)])

    def fails(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(writing, "_sync", fails)
    with pytest.raises(TrainingFault, match="Input/output error"):
        writer.append([item(1)])
    merge(folder)
    check(folder, [0])


def test_rows_are_written_after_their_payloads_are_durable(folder, monkeypatch):
    did = []
    write_, sync = os.writev, os.fdatasync
    names = {}

    def named(descriptor):
        return names.setdefault(descriptor, str(Path(f"/proc/self/fd/{descriptor}").readlink()).rsplit(".", 2)[1])

    monkeypatch.setattr(writing.os, "writev", lambda d, v: did.append(("write", named(d))) or write_(d, v))
    monkeypatch.setattr(writing, "_sync", lambda d: did.append(("sync", named(d))) or sync(d))
    writer = SegmentWriter(folder, HEADER)
    writer.append([item(0)])
    did.clear()
    writer.append([item(1), item(2)])
    assert did == [("write", "bin"), ("sync", "bin"), ("write", "idx"), ("sync", "idx")]


def test_a_segment_sealed_half_way_is_read(folder):
    write(folder, range(4), seal=False)
    (name,) = folder.names()
    folder.file(name, BIN).rename(folder.segments / f"{name}.bin")  # killed between the two names
    assert not folder.sealed(name) and Journal(folder, name).length() == 4
    merge(folder)
    check(folder, range(4))


def test_two_writers_never_share_a_file(folder):
    first, second = SegmentWriter(folder, HEADER), SegmentWriter(folder, HEADER)
    for number in range(4):
        (first, second)[number % 2].append([item(number)])
    assert len(folder.names()) == 2
    first.close(), second.close()
    merge(folder)
    check(folder, range(4))


# --- the folder ---


def test_a_folder_without_a_cache_is_named(tmp_path):
    with pytest.raises(DataFault, match=rf"^{tmp_path / 'nothing'}: .*cache\.json.*--cache_dir"):
        CacheFolder.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_cache_of_another_format_is_named_and_left_alone(folder):
    (folder.path / "cache.json").write_text('{"format": 7}')
    for create in (False, True):
        with pytest.raises(DataFault, match=rf"^{folder.path}: .*format 7, .*format 1\b.*--cache_dir"):
            CacheFolder.open(folder.path, create=create)
    assert (folder.path / "cache.json").read_text() == '{"format": 7}'


@pytest.mark.parametrize("content", ["", "{", "[]", '{"other": 1}'])
def test_a_damaged_mark_is_named(folder, content):
    (folder.path / "cache.json").write_text(content)
    with pytest.raises(DataFault, match=r"cache\.json cannot .*read"):
        CacheFolder.open(folder.path, create=True)


def test_a_place_where_no_folder_can_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingFault, match=rf"^{tmp_path / 'file' / 'cache'}: .*\(Not a directory\).*--cache_dir"):
        CacheFolder.open(tmp_path / "file" / "cache", create=True)


def test_it_goes_to_other_processes(folder):
    again = pickle.loads(pickle.dumps(folder))
    assert again.path == folder.path and again.writable
