"""Cached features in bytes: what is put in comes out, whole or not at all, and what is damaged is noticed."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from difftrain.contracts import Bucket, DataFault, Feature, TrainingFault
from difftrain.data.cache import layout as layout_module
from difftrain.data.cache.layout import Entry, Layout, Part
from difftrain.data.cache.places import Damaged, Folder, Place, SharedMemory
from difftrain.data.cache.store import Captions, Pictures, Shelf, hash_of
from difftrain.data.media import Unusable

FEATURES = {
    "map": Feature(3, factor=8),
    "tokens": Feature(5, length=7, dtype="bfloat16"),
    "vector": Feature(9, dtype="float16"),
}
WIDE, TALL = Bucket(32, 64), Bucket(64, 32)


def made(entry: Entry, count: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(count, *shape, generator=generator).to(entry.dtypes[name])
        for name, shape in entry.shapes.items()
    }


def fill(layout: Layout, place: Place, variants: int = 1) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Write every part, and return what each (entry, variant) is."""
    known = {}
    for part in layout.parts:
        entry, room = layout.entries[part.bucket], place.room(part)
        for variant in range(variants):
            values = made(entry, part.count, 10 * part.number + variant)
            entry.put(room, range(part.count), variant, values)
            for row in range(part.count):
                known[part.first + row, variant] = {name: value[row] for name, value in values.items()}
        place.commit(part, room, {})
    return known


def in_memory(layout: Layout) -> SharedMemory:
    return SharedMemory(SharedMemory.reserve(layout.bytes), layout.parts)


def on_disk(layout: Layout, folder: Path) -> Folder:
    return Folder(folder, [f"part-{part.number}" for part in layout.parts])


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "PART_ENTRIES", 4)


def test_shapes_of_features() -> None:
    shapes = [each.shape(Bucket(64, 96)) for each in FEATURES.values()]
    assert shapes == [(3, 8, 12), (7, 5), (9,)]


def test_parts_are_cut_by_bucket_entries_and_bytes(monkeypatch: pytest.MonkeyPatch, small_parts: None) -> None:
    layout = Layout(FEATURES, [(WIDE, 9), (TALL, 4), (Bucket(8, 8), 1)], variants=2)
    stride = 2 * (3 * 4 * 8 * 4 + 7 * 5 * 2 + 9 * 2)
    assert [(part.bucket, part.first, part.count) for part in layout.parts] == [
        (WIDE, 0, 4), (WIDE, 4, 4), (WIDE, 8, 1), (TALL, 9, 4), (Bucket(8, 8), 13, 1)
    ]  # fmt: skip
    assert {part.stride for part in layout.parts[:4]} == {stride}
    assert layout.count == 14 and layout.bytes == 13 * stride + 2 * (3 * 4 + 70 + 18)
    assert [layout.part_of(slot).number for slot in (0, 3, 4, 8, 9, 12, 13)] == [0, 0, 1, 2, 3, 3, 4]
    monkeypatch.setattr(layout_module, "PART_BYTES", 2 * stride + 1)
    assert [part.count for part in Layout(FEATURES, [(WIDE, 5)], 2).parts] == [2, 2, 1]
    monkeypatch.setattr(layout_module, "PART_BYTES", 1)  # an entry is never cut
    assert [part.count for part in Layout(FEATURES, [(WIDE, 2)]).parts] == [1, 1]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_what_is_put_in_comes_out_bit_by_bit(tmp_path: Path, small_parts: None, kind: str) -> None:
    layout = Layout(FEATURES, [(WIDE, 9), (TALL, 3)], variants=2)
    place = in_memory(layout) if kind == "memory" else on_disk(layout, tmp_path / "new" / "folder")
    known = fill(layout, place, variants=2)
    shelf = Shelf(layout, [place.find(part) for part in layout.parts])
    for slots, variants in (([8, 0, 5], [0, 1, 1]), ([11, 9], [1, 0]), ([3], [0])):
        found = shelf.read(slots, variants)
        assert found.keys() == FEATURES.keys()
        for name, value in found.items():
            wanted = torch.stack([known[pair][name] for pair in zip(slots, variants, strict=True)])
            assert value.dtype == wanted.dtype and value.equal(wanted), name
    with pytest.raises(ValueError, match="different buckets"):
        shelf.read([0, 9])
    again = pickle.loads(pickle.dumps(shelf)).read([2], [1])  # as a worker that is spawned gets it
    assert again["map"][0].equal(known[2, 1]["map"])


def test_an_encoder_that_makes_something_else_is_a_fault_of_ours() -> None:
    entry = Entry(FEATURES, WIDE)
    values, room = made(entry, 1, 0), np.zeros((1, entry.stride), dtype=np.uint8)
    for wrong in ({"map": values["map"].double()}, {"vector": values["vector"][:, :4]}):
        with pytest.raises(TypeError, match="announced"):
            entry.put(room, [0], 0, values | wrong)


@pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc").exists(), reason="shows memory by /proc")
def test_memory_is_shared_with_other_processes_and_has_no_name(small_parts: None) -> None:
    layout = Layout(FEATURES, [(WIDE, 6)])
    path = SharedMemory.reserve(layout.bytes)
    child = os.fork()
    if not child:  # another rank of the machine, which fills it
        fill(layout, SharedMemory(path, layout.parts))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    place = SharedMemory(path, layout.parts)
    found = Shelf(layout, [place.find(part) for part in layout.parts]).read([5])
    assert found["map"][0].equal(made(layout.entries[WIDE], 2, 10)["map"][1])
    assert path.startswith("/proc/") and "deleted" in str(Path(path).readlink())


def one_part(tmp_path: Path) -> tuple[Folder, Part, Path]:
    layout = Layout(FEATURES, [(WIDE, 3)])
    place = on_disk(layout, tmp_path)
    entries = place.room(layout.parts[0])
    entries[:] = np.arange(entries.size, dtype=np.uint8).reshape(entries.shape)
    place.commit(layout.parts[0], entries, {1: "broken: no picture"})
    return place, layout.parts[0], place.file(layout.parts[0])


def test_a_part_is_whole_with_what_was_left_out(tmp_path: Path) -> None:
    place, part, file = one_part(tmp_path)
    assert place.whole(part, check=True) and place.rejected(part) == {1: "broken: no picture"}
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    file.unlink()
    assert not place.whole(part, check=True)
    with pytest.raises(Damaged, match="cannot be read"):
        place.rejected(part)


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.999])
def test_a_part_that_was_cut_is_damaged(tmp_path: Path, keep: float) -> None:
    place, part, file = one_part(tmp_path)
    os.truncate(file, int(keep * file.stat().st_size) if 0 < keep < 1 else int(keep))
    for check in (True, False):
        with pytest.raises(Damaged):
            place.whole(part, check=check)


def test_one_bit_anywhere_is_found_by_the_checksum(tmp_path: Path) -> None:
    place, part, file = one_part(tmp_path)
    whole = file.read_bytes()
    for position in (*range(0, part.bytes, 97), *range(part.bytes, len(whole))):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(Damaged):
            place.whole(part, check=True)
    damaged = bytearray(whole)
    damaged[7] ^= 4
    file.write_bytes(damaged)
    assert place.whole(part, check=False)  # what --skip_cache_check takes


def test_a_part_of_other_entries_is_damaged(tmp_path: Path) -> None:
    one_part(tmp_path)
    fewer = Layout(FEATURES, [(WIDE, 2)])
    with pytest.raises(Damaged):
        on_disk(fewer, tmp_path).whole(fewer.parts[0], check=False)


def test_a_kill_while_a_part_is_written_leaves_none_and_the_next_start_writes_it(tmp_path: Path) -> None:
    layout = Layout(FEATURES, [(WIDE, 3)])
    place, part = on_disk(layout, tmp_path), layout.parts[0]
    for moment in ("fsync", "replace"):
        child = os.fork()
        if not child:

            def die(*_: object) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(os, moment, die) if moment == "fsync" else setattr(Path, "replace", die)
            place.commit(part, place.room(part), {})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert not place.whole(part, check=True)
    left = list(tmp_path.glob("tmp-*"))
    assert len(left) == 2  # what the two have left behind
    place.clean(time.time())
    assert sorted(tmp_path.glob("tmp-*")) == sorted(left)  # another process may be writing them
    place.clean(time.time() + 25 * 3600)
    assert not list(tmp_path.iterdir())
    place.commit(part, place.room(part), {})
    assert place.whole(part, check=True)


def test_two_writers_of_one_part_are_merely_wasteful(tmp_path: Path) -> None:
    layout = Layout(FEATURES, [(WIDE, 3)])
    first, second = on_disk(layout, tmp_path), on_disk(layout, tmp_path)
    rooms = [place.room(layout.parts[0]) for place in (first, second)]
    for place, room in zip((first, second), rooms, strict=True):
        place.commit(layout.parts[0], room, {})
        assert first.whole(layout.parts[0], check=True) and second.whole(layout.parts[0], check=True)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(FEATURES, [(WIDE, 3)])
    place = on_disk(layout, tmp_path / "cache")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingFault, match=r"cache: .*No space left on device.*--cache_dir"):
        place.commit(layout.parts[0], place.room(layout.parts[0]), {})
    assert not list((tmp_path / "cache").iterdir())


def test_files_of_other_states_of_the_data_are_counted(tmp_path: Path) -> None:
    place, _, file = one_part(tmp_path)
    assert place.unused() == (0, 0)
    (tmp_path / "older.part").write_bytes(bytes(10))
    assert place.unused() == (1, 10) and file.exists()


def test_a_file_that_goes_or_shrinks_during_a_run_is_named(tmp_path: Path) -> None:
    place, part, file = one_part(tmp_path)
    shelf = Shelf(Layout(FEATURES, [(WIDE, 3)]), [place.find(part)])
    shelf.read([2])
    os.truncate(file, part.bytes - 1)
    with pytest.raises(DataFault, match=f"{file.name}: .*end too early"):
        shelf.read([2])
    file.unlink()
    with pytest.raises(DataFault, match=f"{file.name}: .*no longer be read"):
        pickle.loads(pickle.dumps(shelf)).read([0])


def test_pictures_are_found_by_record_and_empty_ones_say_why(tmp_path: Path) -> None:
    layout = Layout({"map": FEATURES["map"]}, [(WIDE, 3)], variants=2)
    place = in_memory(layout)
    known = fill(layout, place, variants=2)
    shelf = Shelf(layout, [place.find(part) for part in layout.parts])
    slots = np.array([-1, 2, 0, 1])
    pictures = Pictures(shelf, slots, {3: "truncated: it ends too early"})
    found = pictures.read([1, 2, 1], [False, True, True])["map"]
    assert found.equal(torch.stack([known[2, 0]["map"], known[0, 1]["map"], known[2, 1]["map"]]))
    pictures.check(1)
    with pytest.raises(Unusable, match=r"^truncated: it ends too early$") as caught:
        pictures.check(3)
    assert caught.value.kind == "truncated"


def test_captions_are_found_by_their_text_also_where_half_of_a_hash_is_another_s() -> None:
    texts = ["a", "", "ein Bär\ud800", "a "]
    layout = Layout({"vector": FEATURES["vector"]}, [(Bucket(0, 0), 5)])
    place = in_memory(layout)
    known = fill(layout, place)
    rows = sorted([*map(hash_of, texts), (hash_of("a")[0], 0)])
    high, low = (np.array([row[i] for row in rows], dtype=np.uint64) for i in (0, 1))
    captions = Captions(Shelf(layout, [place.find(part) for part in layout.parts]), high, low)
    found = captions.read(texts)["vector"]
    assert found.equal(torch.stack([known[rows.index(hash_of(text)), 0]["vector"] for text in texts]))
    with pytest.raises(KeyError, match="another"):
        captions.read(["another"])
