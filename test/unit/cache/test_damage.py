"""SegmentDamage to a cache: whatever is flipped, cut or deleted is named by verify, and mended by repair without other loss."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import raised_by
from small_caches import add_reject, address, flip, interrupted, item, make, served, want, write

from difftrain.cache.store import references
from difftrain.cache.store.folder import BIN, IDX, CacheFolder
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.tools.repair import repair
from difftrain.cache.tools.segment_check import SegmentDamage
from difftrain.cache.tools.verify import VerifyReport, verify
from difftrain.contracts import ConfigFault, DifftrainError, TrainingFault


def damages(folder: CacheFolder) -> list[SegmentDamage]:
    return verify(folder).damages


def kinds(folder: CacheFolder) -> set[str]:
    return {damage.kind for damage in damages(folder)}


def row_of(folder: CacheFolder, number: int):
    row = Metadata(folder.database).lookup(address(number))
    assert row is not None
    return row


def test_a_whole_cache_is_whole(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    add_reject(folder, 99)
    report = verify(folder)
    assert not report.damages and report.entries == 19 and report.segments == 4
    assert re.search(r"metadata\.db .* 1 entries ", " ".join(report.notes))  # the reject was not merged
    assert verify(folder, workers=2).document() | {"seconds": 0} == report.document() | {"seconds": 0}


def test_an_empty_cache_is_whole_and_can_be_repaired(tmp_path: Path) -> None:
    folder = CacheFolder.open(tmp_path / "c", create=True)
    assert not damages(folder)
    assert len(list(repair(folder))) == 1, "there is nothing to say but that"


def test_one_flipped_bit_is_named_with_segment_offset_address_and_record(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    row = row_of(folder, 8)
    flip(folder.file(row.segment, BIN), row.offset + row.length - 20)
    (damage,) = damages(folder)
    assert damage.kind == "checksum" and damage.segment == row.segment and damage.offset == row.offset
    assert damage.address == address(8).hex() and damage.record == "picture 8"
    for part in (row.segment, f"{row.offset:,}", address(8).hex(), "picture 8"):
        assert part in str(damage)


@pytest.mark.parametrize(
    ("hurt", "kind"),
    [
        (lambda path, row: path.unlink(), "deleted"),
        (lambda path, row: os.truncate(path, row.offset + 3), "truncated"),
        (lambda path, row: os.truncate(path, path.stat().st_size - 1), "truncated"),
        (lambda path, row: flip(path, 40), "header"),
        (lambda path, row: flip(path, 16), "header"),  # another format
        (lambda path, row: path.write_bytes(b""), "header"),
        (lambda path, row: path.write_bytes(path.read_bytes() + bytes(64)), "journal"),
    ],
)
def test_damage_to_payload_files(tmp_path: Path, hurt: Callable[..., None], kind: str) -> None:
    folder = make(tmp_path / "c")
    row = row_of(folder, 3)
    hurt(folder.file(row.segment, BIN), row)
    assert kind in kinds(folder)
    assert all(row.segment in str(damage) or damage.kind == "missing" for damage in damages(folder))


@pytest.mark.parametrize(
    ("hurt", "kind"), [(lambda path: flip(path, -1), "padding"), (lambda path: os.truncate(path, 310), "truncated")]
)
def test_damage_behind_the_last_entry(tmp_path: Path, hurt: Callable[[Path], None], kind: str) -> None:
    folder = CacheFolder.open(tmp_path / "c", create=True)
    add_reject(folder, 1)
    merge(folder)
    row = row_of(folder, 1)
    path = folder.file(row.segment, BIN)
    assert row.offset + row.length < 310 < path.stat().st_size  # zeros fill it up
    before = served(folder)
    hurt(path)
    assert kinds(folder) == {kind}
    list(repair(folder))
    assert not damages(folder) and served(folder) == before


@pytest.mark.parametrize(
    ("hurt", "kind"),
    [
        (lambda path: path.unlink(), "deleted"),
        (lambda path: os.truncate(path, path.stat().st_size - 48), "journal"),
        (lambda path: os.truncate(path, path.stat().st_size - 7), "journal"),
        (lambda path: flip(path, -100), "journal"),
        (lambda path: flip(path, 100), "header"),
    ],
)
def test_damage_to_journals_costs_nothing_that_the_index_knows(
    tmp_path: Path, hurt: Callable[[Path], None], kind: str
) -> None:
    folder = make(tmp_path / "c")
    before = served(folder)
    hurt(folder.file(row_of(folder, 3).segment, IDX))
    assert kind in kinds(folder)
    assert "set aside" in " ".join(repair(folder))
    assert not damages(folder) and served(folder) == before


@pytest.mark.parametrize(
    "hurt",
    [
        lambda path: path.unlink(),
        lambda path: os.truncate(path, 5000),
        lambda path: flip(path, -1000),
        lambda path: path.write_bytes(b"no database"),
        lambda path: flip(path, 63),  # PRAGMA user_version: one of another program
    ],
)
def test_damage_to_the_index_is_named_and_mended(tmp_path: Path, hurt: Callable[[Path], None]) -> None:
    folder = make(tmp_path / "c")
    before = served(folder)
    hurt(folder.database)
    (damage,) = damages(folder)
    assert damage.kind == "database" and "metadata.db" in str(damage)
    list(repair(folder))
    assert not damages(folder) and served(folder) == before


def test_an_index_of_another_cache_disagrees_with_the_journals(tmp_path: Path) -> None:
    folder, other = make(tmp_path / "c"), make(tmp_path / "d", segments=1)
    shutil.copy(other.database, folder.database)
    assert "deleted" in kinds(folder)  # a segment that it names
    list(repair(folder))
    assert not damages(folder) and len(served(folder)) == 18


def test_an_edited_index_is_found(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    with sqlite3.connect(folder.database) as db:
        db.execute("DELETE FROM entries WHERE number = 3")
    assert kinds(folder) == {"database"}


def test_what_is_marked_whole_and_is_not(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    want(folder, "more", range(20))
    (damage,) = damages(folder)
    assert damage.kind == "missing" and damage.entries == 2 and "uses/more.json" in str(damage)
    list(repair(folder))
    assert not damages(folder)
    assert {use.id: use.complete for use in references.all_references(folder)} == {"all": True, "more": False}


def test_damaged_lists_are_set_aside(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    row = row_of(folder, 3)
    references.add(folder, [(row.segment, row.offset)])
    merge(folder)
    references.mark_complete(folder, "all", complete=False)
    assert not damages(folder)
    flip(next(folder.tombstones_dir.glob("*.rows")), -1)
    flip(next(folder.references_dir.glob("*.npy")), -1)
    assert kinds(folder) == {"drops", "uses"}
    said = " ".join(repair(folder))
    assert "uses/all: " in said
    assert not damages(folder) and len(served(folder)) == 18  # what was dropped is whole, so it counts again
    assert len(list((folder.path / "set_aside").rglob("*.*"))) == 3


def test_files_that_are_none_of_a_cache(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    for name in ("segments/notes.txt", "segments/seg-1.bin", "drops/notes.txt", "uses/y.txt"):
        (folder.path / name).write_text("mine")
    (folder.segments / ".nfs0001").write_text("a system's")
    found = damages(folder)
    assert {damage.file for damage in found} == {
        "segments/notes.txt",
        "segments/seg-1.bin",
        "drops/notes.txt",
        "uses/y.txt",
    }
    list(repair(folder))
    assert not damages(folder)
    assert sorted(path.read_text() for path in (folder.path / "set_aside").rglob("*.*")) == ["mine"] * 4
    assert (folder.segments / ".nfs0001").exists()


def test_repair_and_encoding_again_make_a_cache_whole(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    before = served(folder)
    row = row_of(folder, 8)
    flip(folder.file(row.segment, BIN), row.offset + 130)
    folder.file(row_of(folder, 1).segment, BIN).unlink()
    said = list(repair(folder))
    assert any(line.startswith("7 damaged entries ") for line in said)
    assert set(before) - set(served(folder)) == {address(number) for number in (0, 1, 2, 3, 4, 5, 8)}
    assert not references.all_references(folder)[0].complete  # so that no run trusts it
    write(folder, [0, 1, 2, 3, 4, 5, 8])
    merge(folder)
    assert not damages(folder) and served(folder) == before


def test_a_build_that_was_killed_leaves_no_damage(tmp_path: Path) -> None:
    interrupted(tmp_path / "c", range(6))
    folder = CacheFolder.open(tmp_path / "c")
    (part,) = folder.segments.glob("*.bin.part")
    (journal,) = folder.segments.glob("*.idx.part")
    assert not [damage for damage in damages(folder) if damage.kind != "database"]
    merge(folder)
    part.write_bytes(part.read_bytes() + b"half of an entry that was never committed")
    journal.write_bytes(journal.read_bytes() + bytes(20))
    report = verify(folder)
    assert not report.damages and report.entries == 6
    flip(part, -200)
    assert "checksum" in kinds(folder)
    list(repair(folder))
    assert not damages(folder) and len(served(folder)) == 5


def test_rows_that_an_unsealed_journal_has_lost_are_known_from_the_index(tmp_path: Path) -> None:
    interrupted(tmp_path / "c", range(6))
    folder = CacheFolder.open(tmp_path / "c")
    merge(folder)
    before = served(folder)
    (journal,) = folder.segments.glob("*.idx.part")
    os.truncate(journal, journal.stat().st_size - 2 * 48)
    assert any("lacks 2 entries" in str(damage) for damage in damages(folder))
    list(repair(folder))
    assert not damages(folder) and served(folder) == before


def test_a_segment_that_is_being_begun_is_no_damage(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    header = folder.file(folder.names()[0], BIN).read_bytes()[:256]
    name = f"seg-{'0' * 32}-000000"
    for size in (0, 100, 256):
        (folder.segments / f"{name}.bin.part").write_bytes(header[:size])
        assert not damages(folder), size
    (folder.segments / f"{name}.idx.part").write_bytes(header[:10])
    assert not damages(folder)


def test_files_of_a_build_that_runs_are_left_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    writer = write(folder, range(50, 53), seal=False)  # by this process, which is alive
    merge(folder)
    (journal,) = folder.segments.glob("*.idx.part")
    flip(journal, -100)
    said = " ".join(repair(folder))
    assert f"segments/{journal.name.partition('.')[0]}: a build " in said and journal.exists()
    flip(journal, -100)
    writer.close()
    assert not damages(folder)


def test_a_disk_that_cannot_read_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "c", segments=1)
    row, real = row_of(folder, 3), os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= row.offset < offset + len(buffers[0]):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    found = [damage for damage in damages(folder) if damage.kind == "unreadable"]
    assert row.offset in {damage.offset for damage in found} and "Input/output error" in str(found[0])


def test_a_process_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from difftrain.cache.tools import verify as module

    folder = make(tmp_path / "c")
    monkeypatch.setattr(module, "_task", killed)
    with pytest.raises(TrainingFault, match="was killed"):
        verify(folder, workers=2)


def killed(task: object) -> None:
    os.kill(os.getpid(), 9)


def test_a_read_only_cache_is_verified_and_not_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "c")
    flip(folder.database, -1000)
    monkeypatch.setattr(CacheFolder, "writable", False)
    before = sorted(tmp_path.rglob("*"))
    assert kinds(folder) == {"database"}
    with pytest.raises(ConfigFault, match=rf"CACHE: '{folder.path}' ") as caught:
        list(repair(folder))
    assert raised_by(caught, "refuse_read_only")
    assert sorted(tmp_path.rglob("*")) == before


# --- anything, anywhere ---


def hurt_at_random(folder: CacheFolder, chance: random.Random) -> list[str]:
    """Flip, cut or delete one to three files of a cache; return what was done."""
    files = [path for path in sorted(folder.path.rglob("*")) if path.is_file()]
    done = []
    for path in chance.sample(files, chance.choice((1, 1, 1, 2, 3))):
        how, size = chance.choice(("flip", "truncate", "delete")), path.stat().st_size
        if how == "delete" and path.suffix != ".json":  # a use without its facts is one that is forgotten
            path.unlink()
        elif how == "truncate":
            os.truncate(path, chance.randrange(size))
        else:
            flip(path, chance.randrange(size), chance.randrange(8))
        done.append(f"{how} {path.name}")
    for path in folder.segments.glob("*.part"):
        os.utime(path, (0, 0))  # silent for so long that its writer is gone even where nothing names it any more
    return done


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 30))])
def test_any_damage_is_found_and_mended_without_loss_of_what_is_whole(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    interrupted(tmp_path / "template", range(12, 18))
    make(tmp_path / "template", segments=2)
    folder = CacheFolder.open(tmp_path / "template")
    want(folder, "all", range(18))
    originals = {address(number): b"".join(map(bytes, item(number).pieces)) for number in range(18)}
    for number in range(10):
        folder = CacheFolder(tmp_path / f"{number}")
        shutil.copytree(tmp_path / "template", folder.path)
        done = hurt_at_random(folder, chance)
        if not any("cache.json" in each for each in done):
            assert_mended(folder, originals, done)
            continue
        with pytest.raises(DifftrainError, match=r"cache\.json|of format \d"):
            CacheFolder.open(folder.path)


def assert_mended(folder: CacheFolder, originals: dict[bytes, bytes], done: list[str]) -> None:
    report: VerifyReport = verify(folder)
    assert report.damages, done
    list(repair(folder))
    assert not damages(folder), done
    left = served(folder)
    assert all(originals[each] == payload for each, payload in left.items()), done
    if all(each.endswith((".npy", ".db")) or each.startswith("flip") for each in done):
        assert len(left) >= len(originals) - len(done), done  # each costs the entry that it hit, at most
