"""The contract of every kind of source: whole records, keys that hang on no place, and nothing left out without a word.

A kind needs one thing of its own here, a writer in test/support/sources.py.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from index_lines import read_again
from looking import in_this_process  # noqa: F401
from refusals import names
from sources import WRITERS, Sample

from difftrain.config import CaptionSection, DataSection
from difftrain.contracts import DataFault, Record
from difftrain.data.index.build import build_index
from difftrain.data.index.index import Index
from difftrain.data.sources import SOURCES, open_source
from difftrain.data.sources.base import BadItem, FileRef, SourceItem
from difftrain.data.sources.configured import configured_sources
from difftrain.testing.pictures import picture

GOOD = [Sample(number, f"cat {number}", (20 + number, 18)) for number in range(5)]
# what cannot be trained on -> the kind of its reason
BAD = {
    5: (Sample(5, data=picture(5, (30, 30))[:900]), "truncated"),
    6: (Sample(6, data=b"I am a text file"), r"not\b[^:]* image"),
    7: (Sample(7, None, data=b""), "empty|no caption"),
    8: (Sample(8, size_wh=(15, 40)), "too small"),
    9: (Sample(9, None), "no caption|empty caption"),
    10: (Sample(10, " \n "), "no caption|empty caption"),
}


@pytest.fixture(params=SOURCES)
def kind(request: pytest.FixtureRequest) -> str:
    """Name a kind of source."""
    assert request.param in WRITERS, "a new kind has a writer in test/support/sources.py"
    return str(request.param)


def built(
    kind: str, root: Path, samples: list[Sample] | None = None, *, said: list[str] | None = None, **options: Any
) -> Index:
    """Write samples as a kind of source, where some are given, and bring its index beside them up to date."""
    if samples is not None:
        shutil.rmtree(root, ignore_errors=True)
    fields = options.pop("fields") if samples is None else WRITERS[kind](root, samples)
    captions = CaptionSection(**options.pop("captions", {}))
    log = ([] if said is None else said).append
    summary = build_index(DataSection(**fields, **options), captions, root.with_suffix(".index"), log=log)
    # as the configuration names them
    return Index(Path(summary.folder), [(info.root, info.only) for info in summary.sources if info.kind == "class"])


def records(index: Index) -> list[Record]:
    return [index.record(number) for number in range(index.count)]


def keys(index: Index) -> dict[str, bytes]:
    """Return the keys by caption."""
    return {record.captions[0]: record.key for record in records(index)}


def numbers(paths: list[str]) -> list[int]:
    """Return which samples are named: 7.png, sub/7.png, 0.tar!7.png, 0.parquet!7."""
    found = [re.search(r"(?:^|[/!])(\d+)(?:\.png)?$", path) for path in paths]
    return sorted(int(match[1]) for match in found if match)


def test_every_kind_is_found_by_the_configuration(kind: str, tmp_path: Path) -> None:
    (info,) = configured_sources(DataSection(**WRITERS[kind](tmp_path / "a", GOOD)), CaptionSection()).infos
    assert info.kind == kind and pickle.loads(pickle.dumps(info)) == info


def test_a_record_has_caption_size_and_bytes_and_names_no_place_of_this_machine(kind: str, tmp_path: Path) -> None:
    index = built(kind, tmp_path / "a", GOOD)
    found = {record.captions: record for record in records(index)}
    assert {captions: record.size_hw for captions, record in found.items()} == {
        (sample.caption,): sample.size_wh[::-1] for sample in GOOD
    }
    for sample in GOOD:
        record = found[(sample.caption,)]  # type: ignore[index]
        assert index.read(record.media) == sample.bytes
        assert str(tmp_path) not in record.name + record.media.path and not record.media.path.startswith("/")
    assert len({record.key for record in found.values()}) == len(GOOD) and not index.summary.rejected


@pytest.mark.usefixtures("in_this_process")
def test_keys_ids_and_fingerprint_are_those_of_the_same_data_elsewhere(kind: str, tmp_path: Path) -> None:
    fields = WRITERS[kind](tmp_path / "a", GOOD)
    here = built(kind, tmp_path / "a", fields=fields)
    for path in sorted((tmp_path / "a").rglob("*"), reverse=True):  # created in another order
        if path.is_file():
            to = tmp_path / "elsewhere" / path.relative_to(tmp_path / "a")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    moved = {key: _moved(value, str(tmp_path / "a"), str(tmp_path / "elsewhere")) for key, value in fields.items()}
    there = built(kind, tmp_path / "elsewhere", fields=moved)
    assert [(r.id, r.key, r.media, r.captions, r.content) for r in records(here)] == [
        (r.id, r.key, r.media, r.captions, r.content) for r in records(there)
    ]
    assert here.fingerprint == there.fingerprint


def _moved(value: Any, old: str, new: str) -> Any:
    return tuple(_moved(each, old, new) for each in value) if isinstance(value, tuple) else value.replace(old, new)


def test_two_readings_have_one_order_and_headers_tell_the_number(kind: str, tmp_path: Path) -> None:
    fields = WRITERS[kind](tmp_path / "a", GOOD)
    (info,) = configured_sources(DataSection(**fields), CaptionSection()).infos

    def read() -> list[Any]:
        source = open_source(pickle.loads(pickle.dumps(info)))
        listed = sorted(file.path for file in source.listing() if file.role == "media")
        captions = {file.path.rpartition(".")[0]: file.path for file in source.listing() if file.role == "caption"}
        assert all(source.check(path) == "" for path in listed)
        assert len(listed) == (1 if source.sharded else len(GOOD))
        found: list[Any] = []
        for path in listed:
            items = list(source.items(FileRef(path, captions.get(path.rpartition(".")[0]))))
            assert source.count(path, 100) == len(items) and 0 < source.count(path, 1) <= len(items)
            found += [(path, _facts(each)) for each in items]
        return found

    first = read()
    assert first == read() and len(first) == len(GOOD)


def _facts(item: SourceItem | BadItem) -> tuple[Any, ...]:
    assert isinstance(item, SourceItem)
    with item.open() as file:
        return item.member, item.offset, item.length, item.size, item.captions, item.path, item.key, file.read()


@pytest.mark.usefixtures("in_this_process")
def test_workers_and_threads_read_what_their_parent_reads(kind: str, tmp_path: Path) -> None:
    index = built(kind, tmp_path / "a", GOOD)
    media = [record.media for record in records(index)] * 4
    expected = [index.read(each) for each in media]
    assert [pickle.loads(pickle.dumps(index)).read(each) for each in media] == expected
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(index.read, media)) == expected
    child = os.fork()
    if not child:
        try:
            os._exit(int([index.read(each) for each in media] != expected))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [index.read(each) for each in media] == expected


@pytest.mark.flags("verify_data")
@pytest.mark.parametrize("verify", ["full", "quick"])
def test_what_cannot_be_used_is_counted_and_named_and_loses_nothing_but_itself(
    kind: str, verify: str, tmp_path: Path
) -> None:
    said: list[str] = []
    bad = [sample for sample, _ in BAD.values()]
    samples = sorted([*GOOD, *bad], key=lambda sample: sample.number)
    index = built(kind, tmp_path / "a", samples, said=said, verify=verify, max_rejected_share=0.9)
    assert keys(index).keys() == {sample.caption for sample in GOOD}
    rejects = {numbers([reject.path])[0]: reject.reason for reject in index.rejects()}
    assert rejects.keys() == BAD.keys() and index.summary.rejected == len(BAD)
    for number, (_, reason) in BAD.items():
        assert re.match(rf"(?:{reason}): ", rejects[number]), rejects[number]
    assert "index: rejected, too small: 1" in "\n".join(said)
    with pytest.raises(DataFault, match=r"^6 of 11 ") as caught:
        built(kind, tmp_path / "b", samples, verify=verify)
    assert caught.value.exit_code == 2


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.flags("allow_empty_caption")
def test_a_picture_without_a_caption_may_be_allowed(kind: str, tmp_path: Path) -> None:
    fields = WRITERS[kind](tmp_path / "a", [Sample(0), Sample(1, None), Sample(2, " \n ")])
    index = built(kind, tmp_path / "a", fields=fields, captions={"allow_empty": True})
    assert sorted(record.captions for record in records(index)) == [("",), ("",), ("a cat",)]
    index = built(kind, tmp_path / "a", fields=fields, max_rejected_share=0.7)  # what was known is looked at again
    assert index.count == 1 and index.summary.rejected == 2


@pytest.mark.usefixtures("in_this_process")
def test_what_changes_is_looked_at_again_and_keeps_its_key(kind: str, tmp_path: Path) -> None:
    root, said = tmp_path / "a", []
    fields = WRITERS[kind](root, GOOD)
    first = built(kind, root, fields=fields)
    same = built(kind, root, fields=fields, said=said)
    assert same.folder == first.folder and read_again("\n".join(said)) == 0
    changed = [GOOD[0], GOOD[1]._replace(caption="a dog"), GOOD[2]._replace(size_wh=(40, 30)), *GOOD[3:]]
    second = built(kind, root, changed)
    assert second.fingerprint != first.fingerprint
    assert [record.key for record in records(second)] == [record.key for record in records(first)]
    found = {record.captions[0]: record for record in records(second)}
    assert found["cat 2"].size_hw == (30, 40) and second.read(found["cat 2"].media) == changed[2].bytes
    assert found.keys() == {sample.caption for sample in changed}
    third = built(kind, root, [*GOOD, Sample(5, "new")])
    assert {k: v for k, v in keys(third).items() if k != "new"} == keys(first)
    fewer = built(kind, root, GOOD[:3])
    assert keys(fewer) == {caption: key for caption, key in keys(first).items() if caption in keys(fewer)}
    assert fewer.count == 3 and built(kind, root, GOOD).fingerprint == first.fingerprint


@pytest.mark.usefixtures("in_this_process")
def test_duplicates_are_told_and_kept(kind: str, tmp_path: Path) -> None:
    said: list[str] = []
    twin = GOOD[1].bytes
    index = built(kind, tmp_path / "a", [*GOOD, Sample(5, "x", data=twin), Sample(6, "y", data=twin)], said=said)
    assert index.count == 7 and index.duplicates == 2
    assert any(line.startswith("index: ") and names(line, 2) for line in said)


@pytest.mark.usefixtures("in_this_process")
def test_bytes_that_have_gone_are_an_os_error(kind: str, tmp_path: Path) -> None:
    """Then the loader names the item, and draws another."""
    index = built(kind, tmp_path / "a", GOOD)
    worker = pickle.loads(pickle.dumps(index))
    media = [record.media for record in records(index)]
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file():
            path.unlink()
    for each in media:
        with pytest.raises(OSError):
            worker.read(each)
