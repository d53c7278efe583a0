"""Freeing what nothing wants: what is wanted stays readable, whatever happens beside it and whenever it is killed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from refusals import raised_by
from small_caches import WANTED, address, assert_whole, flip, interrupted, make, partly_wanted, served, want, write

from difftrain.cache.store import references
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.tools import gc
from difftrain.cache.tools.repair import repair
from difftrain.cache.tools.verify import verify
from difftrain.contracts import ConfigFault, DataFault
from difftrain.io import process


def collected(folder: CacheFolder, **words: Any) -> str:
    return "\n".join(gc.collect_garbage(folder, **words))


def counts(said: str) -> tuple[int, ...]:
    """Return what the last line counts: segments deleted and rewritten, entries removed and kept."""
    return tuple(int(number) for number in re.findall(r"(?<=[:;,] )(\d+)\b", said.splitlines()[-1])[-4:])


def test_what_nothing_wants_goes(tmp_path: Path) -> None:
    folder = partly_wanted(tmp_path / "c")
    before, originals = sorted(tmp_path.rglob("*")), served(folder)
    said = collected(folder, dry_run=True)
    assert counts(said) == (1, 2, 27, 13)
    assert sorted(tmp_path.rglob("*")) == before
    said = collected(folder)
    assert counts(said) == (1, 2, 27, 13)
    assert_whole(folder, WANTED, originals)
    assert len(folder.names()) == 2 and not list(folder.tombstones_dir.iterdir())  # the new one holds those of two
    assert counts(collected(folder))[0] == 0


def test_bytes_that_are_freed_are_those_of_the_disk(tmp_path: Path) -> None:
    folder = partly_wanted(tmp_path / "c")

    def size() -> int:
        return sum(path.stat().st_size for path in folder.segments.iterdir())

    before = size()
    said = re.search(r"([\d.]+) KiB freed", collected(folder))
    assert said is not None
    assert abs(float(said[1]) - (before - size()) / 1024) < 0.8  # header and rows of what was copied are not counted


def test_uses_are_forgotten_only_when_asked_for(tmp_path: Path) -> None:
    folder = partly_wanted(tmp_path / "c")
    now = (folder.references_dir / "a.json").stat().st_mtime
    os.utime(folder.references_dir / "b.json", (now, now - 10.5 * 86400))
    collected(folder)
    assert len(served(folder)) == 13
    assert "use b" not in collected(folder, unused_days=11)
    assert re.search(r"use b: .* 10 days .*would ", collected(folder, unused_days=10, dry_run=True))
    assert re.search(r"use b: .* 10 days .*, forgotten", collected(folder, unused_days=10))
    assert [use.id for use in references.all_references(folder)] == ["a"] and len(served(folder)) == 10
    assert len(list(folder.references_dir.iterdir())) == 2
    collected(folder, unused_days=0)
    assert not served(folder) and not folder.names()


def test_a_cache_of_no_known_use_is_not_emptied(tmp_path: Path) -> None:
    folder = make(tmp_path / "c")
    references.remove(folder, "all")
    with pytest.raises(DataFault, match=rf"^{re.escape(str(folder.path))}: .*configuration"):
        collected(folder)
    assert len(served(folder)) == 18


def test_a_damaged_list_of_what_is_wanted_stops_it(tmp_path: Path) -> None:
    folder = partly_wanted(tmp_path / "c")
    flip(folder.references_dir / "b.json", 30)
    with pytest.raises(DataFault, match=r"b\.json"):
        collected(folder)
    assert len(served(folder)) == 40


def test_segments_that_are_being_written_stay(tmp_path: Path) -> None:
    folder = partly_wanted(tmp_path / "c")
    running = write(folder, range(50, 55), seal=False)
    said = collected(folder)
    assert re.search(r"segments/seg-\w+-\d+: a build .*stays", said)
    running.close()
    assert_whole(folder, {50, 51, 52, 53, 54}, served(folder))


def test_segments_of_writers_that_were_killed_go(tmp_path: Path) -> None:
    folder = partly_wanted(tmp_path / "c")
    interrupted(folder.path, range(50, 55))
    want(folder, "d", [51])
    originals = served(folder)
    merge(folder)
    originals = served(folder)
    collected(folder)
    assert not list(folder.segments.glob("*.part"))
    assert_whole(folder, WANTED | {51}, originals)
    assert address(50) not in served(folder)


def test_segments_of_other_machines_stay_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = partly_wanted(tmp_path / "c")
    interrupted(folder.path, range(50, 55))
    monkeypatch.setattr(process, "_machine", lambda: "another")
    assert re.search(r"segments/seg-\w+-\d+: .*another machine .*stays", collected(folder))
    for path in folder.segments.glob("*.part"):
        os.utime(path, (0, path.stat().st_mtime - 86500))
    collected(folder)
    assert not list(folder.segments.glob("*.part"))


def test_processes_are_known_by_more_than_their_number() -> None:
    mine = process.this_process()
    machine, number, began = mine.split(":")
    assert process.is_gone(mine) is False
    assert process.is_gone(f"{machine}:{number}:{int(began) + 1}") is True  # the number was given to another one
    assert process.is_gone(f"{machine}:{2**22 + 1}:{began}") is True
    assert process.is_gone(f"other:{number}:{began}") is None and process.is_gone("") is None


def test_a_damaged_segment_stays_until_it_is_repaired(tmp_path: Path) -> None:
    folder = partly_wanted(tmp_path / "c")
    row = Metadata(folder.database).lookup(address(10))
    assert row is not None
    flip(folder.file(row.segment, BIN), row.offset + 130)
    assert f"segments/{row.segment}: " in (said := collected(folder)) and "cache repair" in said
    assert folder.file(row.segment, BIN).exists()
    list(repair(folder))
    collected(folder)
    found = served(folder)
    assert address(10) not in found and address(11) in found and not verify(folder).damages


def test_what_a_build_begins_to_want_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = partly_wanted(tmp_path / "c")
    originals, add = served(folder), references.add_many

    def add_and_want(*args: Any) -> Path | None:
        want(folder, "late", [35])
        return add(*args)

    monkeypatch.setattr(references, "add_many", add_and_want)
    assert re.search(r"^\d+ entries of \d+ segments .*build .*stay", collected(folder), re.MULTILINE)
    assert_whole(folder, WANTED | {35}, originals)


def test_the_last_copy_of_what_is_wanted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair drops the copy that counted, just when a clean-up takes the other one for superfluous."""
    folder = partly_wanted(tmp_path / "c")
    originals = served(folder)
    write(folder, [0])
    merge(folder)
    row, add = Metadata(folder.database).lookup(address(0)), references.add_many
    assert row is not None

    def add_and_repair(*args: Any) -> Path | None:
        monkeypatch.setattr(references, "add_many", add)
        references.add(folder, [(row.segment, row.offset)])
        return add(*args)

    monkeypatch.setattr(references, "add_many", add_and_repair)
    collected(folder)
    assert_whole(folder, WANTED, originals)


def test_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = partly_wanted(tmp_path / "c")
    originals, take = served(folder), gc.delete_segment
    begun: list[str] = []

    def take_after_another(*args: Any) -> int:
        if not begun:
            begun.append("")
            begun.append(collected(folder))
        return take(*args)

    monkeypatch.setattr(gc, "delete_segment", take_after_another)
    collected(folder)
    assert_whole(folder, WANTED, originals)


def test_a_read_only_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = partly_wanted(tmp_path / "c")
    monkeypatch.setattr(CacheFolder, "writable", False)
    with pytest.raises(ConfigFault, match=rf"CACHE: '{folder.path}' ") as caught:
        collected(folder)
    assert raised_by(caught, "refuse_read_only")
    assert counts(collected(folder, dry_run=True))[2] == 27


def test_what_a_repair_set_aside_goes_too(tmp_path: Path) -> None:
    folder = partly_wanted(tmp_path / "c")
    flip(folder.file(folder.names()[0], ".idx"), -100)
    (folder.segments / "notes").write_text("mine")
    list(repair(folder))
    collected(folder)
    assert [path.name for path in (folder.path / "set_aside").rglob("*") if path.is_file()] == ["notes"]
