"""Building a cache that others trust: interrupted, full, damaged, read only, trusted, made anew."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached import (
    BOTH,
    CAPTIONS,
    FLIPPED,
    ON_DISK,
    config,
    entries,
    make,
    use_of,
)
from refusals import is_about, names

from difftrain.cache import encoding
from difftrain.cache.decoding import BatchQueue
from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.index import Metadata
from difftrain.cache.store.references import mark_complete
from difftrain.cache.store.segment import SegmentWriter
from difftrain.contracts import ConfigFault, TrainingFault
from difftrain.data import prepare as preparing
from difftrain.models.families.sdxl import SDXLFamily

Change = Callable[[Path], None]


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder of latents has other weights."""
    described = SDXLFamily.encoders

    def swapped(family: SDXLFamily, parts: Any) -> Any:
        found = described(family, parts)
        return found | {"latents": dataclasses.replace(found["latents"], fingerprint=lambda: "another one")}

    monkeypatch.setattr(SDXLFamily, "encoders", swapped)


@pytest.mark.usefixtures("swapped")
def test_an_encoder_with_other_weights_is_noticed_and_said(
    pictures: Path, own: Path, calls: list[int], caplog: Any
) -> None:
    with caplog.at_level(logging.INFO):
        make(config(pictures, own, ON_DISK))
    assert sum(calls) == FLIPPED
    why = [r.getMessage() for r in caplog.records if re.match(r"cache of \w+: .* encoder ", r.getMessage())]
    assert len(why) == 1 and names(why[0], "latents", "another one")


@pytest.mark.flags("trust_cache")
@pytest.mark.usefixtures("swapped")
def test_a_cache_of_another_encoder_alone_is_not_trusted(pictures: Path, own: Path, calls: list[int]) -> None:
    trusting = config(pictures, own, {**ON_DISK, "trust": True})
    before = entries(own)
    for _ in range(2):  # a start that is refused leaves nothing that the next one trusts
        with pytest.raises(ConfigFault) as caught:
            make(trusting)
        (fault,) = caught.value.faults
        assert is_about(fault, "--trust_cache", own, "latents", "another one")
    assert not calls and entries(own) == before
    make(config(pictures, own, ON_DISK))
    calls.clear()
    make(trusting)
    assert not calls


@pytest.mark.flags("trust_cache")
def test_a_trusted_start_looks_at_no_source_and_no_entry(
    pictures: Path, own: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    wanted = make(config(pictures, own, ON_DISK)).kept()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("looked at")

    monkeypatch.setattr(preparing, "build_index", refuse)
    monkeypatch.setattr(Metadata, "has_many", refuse)
    with caplog.at_level(logging.INFO):
        assert make(config(pictures, own, {**ON_DISK, "trust": True})).kept().equal(wanted)
    assert not calls and "--trust_cache: " in caplog.text


@pytest.mark.flags("trust_cache")
def test_what_was_never_looked_at_cannot_be_trusted(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigFault, match=rf"--trust_cache: .* index .*{re.escape(str(tmp_path / 'index'))}"):
        make(config(pictures, tmp_path, {**ON_DISK, "trust": True}))


@pytest.mark.flags("trust_cache")
def test_a_trusted_cache_that_was_never_whole_is_looked_through(
    pictures: Path, tmp_path: Path, calls: list[int]
) -> None:
    make(config(pictures, tmp_path, {"latents_to_disk": True}))
    calls.clear()
    make(config(pictures, tmp_path, {**ON_DISK, "trust": True}))
    assert calls == [CAPTIONS, CAPTIONS]


@pytest.mark.flags("regenerate_cache")
def test_regenerated_entries_are_encoded_anew_once(pictures: Path, own: Path, calls: list[int]) -> None:
    cfg, anew = config(pictures, own, ON_DISK), config(pictures, own, {**ON_DISK, "regenerate": True})
    wanted, count = make(cfg).kept(), entries(own)
    assert make(anew).kept().equal(wanted)
    assert sum(calls) == FLIPPED + 2 * CAPTIONS and entries(own) == count and use_of(own).complete
    calls.clear()
    make(cfg)
    assert not calls


@pytest.mark.flags("regenerate_cache")
def test_a_regeneration_that_was_interrupted_goes_on(
    pictures: Path, own: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    anew = config(pictures, own, {**ON_DISK, "regenerate": True})
    with monkeypatch.context() as patch, pytest.raises(TrainingFault, match="no more room"):
        full_after(patch, 3)
        make(anew)
    calls.clear()
    make(anew)
    assert 0 < sum(calls) < FLIPPED + 2 * CAPTIONS and use_of(own).complete
    calls.clear()
    make(anew)  # that one was finished: this is another wish
    assert sum(calls) == FLIPPED + 2 * CAPTIONS


@pytest.mark.flags("regenerate_cache")
def test_a_regeneration_that_ended_is_over_even_where_entries_are_lost_later(
    pictures: Path, own: Path, calls: list[int]
) -> None:
    anew = config(pictures, own, {**ON_DISK, "regenerate": True})
    make(anew)
    mark_complete(CacheFolder.open(own), use_of(own).id, complete=False)  # as repair does where it drops something
    calls.clear()
    make(anew)
    assert sum(calls) == FLIPPED + 2 * CAPTIONS


def full_after(patch: pytest.MonkeyPatch, commits: int) -> None:
    """Let the disk be full after some commits of a segment."""
    append, left = SegmentWriter.append, [commits]

    def full(self: SegmentWriter, items: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise TrainingFault("no more room")
        append(self, items)

    patch.setattr(SegmentWriter, "append", full)


def test_a_build_that_met_a_full_disk_goes_on_with_what_was_committed(
    pictures: Path, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(pictures, tmp_path, ON_DISK)
    with monkeypatch.context() as patch, pytest.raises(TrainingFault, match="no more room"):
        full_after(patch, 4)
        make(cfg)
    assert not use_of(tmp_path).complete
    whole = sum(calls)
    calls.clear()
    found = make(cfg).kept()
    assert sum(calls) < FLIPPED + 2 * CAPTIONS and whole and use_of(tmp_path).complete
    assert found.equal(make(config(pictures, tmp_path, BOTH)).kept())


def test_a_signal_ends_a_build_in_good_order(
    pictures: Path, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    cfg, inner = config(pictures, tmp_path, ON_DISK), encoding.decoded_batches

    def stopped(*args: Any) -> Iterator[Any]:
        for number, piece in enumerate(inner(*args)):
            if number == 3:
                raise SystemExit(143)
            yield piece

    with monkeypatch.context() as patch, pytest.raises(SystemExit), caplog.at_level(logging.INFO):
        patch.setattr(encoding, "decoded_batches", stopped)
        make(cfg)
    assert "a signal" in caplog.text
    assert not list((tmp_path / "segments").glob("*.part")) and list((tmp_path / "segments").glob("*.bin"))
    calls.clear()
    make(cfg)
    assert 0 < sum(calls) < FLIPPED + 2 * CAPTIONS


def test_a_build_that_was_killed_goes_on_with_what_is_there(pictures: Path, tmp_path: Path, calls: list[int]) -> None:
    cfg = config(pictures, tmp_path, ON_DISK)
    wanted = make(config(pictures, tmp_path, BOTH)).kept()
    child = os.fork()
    if not child:
        commit = SegmentWriter.append

        def then_die(*args: Any) -> None:
            commit(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        SegmentWriter.append = then_die  # type: ignore[method-assign]
        make(cfg)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    calls.clear()
    assert make(cfg).kept().equal(wanted)
    assert sum(calls) == FLIPPED - 4 + 2 * CAPTIONS  # one batch was there


def test_a_rank_leaves_its_work_where_another_has_failed(pictures: Path, tmp_path: Path, calls: list[int]) -> None:
    handed = BatchQueue(np.arange(5), iter(range(9)).__next__, threading.Event())
    assert list(handed) == [0, 1, 2, 3, 4]
    stop = threading.Event()
    handed = BatchQueue(np.arange(5), iter(range(9)).__next__, stop)
    taken = iter(handed)
    assert next(taken) == 0
    stop.set()
    assert list(taken) == []


@pytest.mark.flags("skip_cache_check")
def test_a_segment_that_is_too_short_or_gone_is_named_at_the_start(pictures: Path, own: Path, caplog: Any) -> None:
    cfg = config(pictures, own, ON_DISK)
    segment = sorted((own / "segments").glob("*.bin"))[0]
    with segment.open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(TrainingFault) as caught:
        make(cfg)
    assert segment.name in str(caught.value) and f"cache repair {own}" in str(caught.value)
    assert " 3,000 of " in str(caught.value)
    make(config(pictures, own, {**ON_DISK, "skip_check": True}))


def test_a_segment_that_is_gone_is_said_and_encoded_anew(
    pictures: Path, own: Path, calls: list[int], caplog: Any
) -> None:
    cfg = config(pictures, own, ON_DISK)
    wanted = make(cfg).kept()
    segment = next(path for path in (own / "segments").glob("*.bin") if path.stat().st_size > 26 * 2000)
    segment.unlink()
    with caplog.at_level(logging.WARNING):
        found = make(cfg).kept()
    assert re.search(rf"segment {segment.stem}: .*payloads .*gone", caplog.text)
    assert calls and found.equal(wanted)


def test_damage_to_what_this_run_does_not_want_is_none_of_its_business(pictures: Path, own: Path) -> None:
    before = set((own / "segments").glob("*.bin"))
    other = config(pictures, own, ON_DISK, data={"resize_interpolation": "nearest"})
    make(other)
    (segment,) = set((own / "segments").glob("*.bin")) - before
    with segment.open("r+b") as file:
        file.truncate(100)
    assert make(config(pictures, own, ON_DISK)).kept().numel()
    with pytest.raises(TrainingFault, match=segment.stem):
        make(other)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path, elsewhere: Path) -> None:
    """Let a cache be one that cannot be written to, whoever runs the test."""
    access = os.access
    monkeypatch.setattr(CacheFolder, "writable", False)
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not Path(path).is_relative_to(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))


def test_a_read_only_cache_is_read_and_not_touched(
    pictures: Path, own: Path, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = make(config(pictures, own, ON_DISK)).kept()
    read_only(monkeypatch, own, tmp_path / "elsewhere")
    before = snapshot(own)
    assert make(config(pictures, own, ON_DISK)).kept().equal(wanted)
    assert snapshot(own) == before and not calls and (tmp_path / "elsewhere" / "difftrain" / "index").is_dir()


def test_a_read_only_cache_that_lacks_something_says_how_much(
    pictures: Path, own: Path, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch, own, tmp_path / "elsewhere")
    before = snapshot(own)
    with pytest.raises(ConfigFault, match=rf"--cache_dir: {re.escape(str(own))} .*: 26 of 26 of latents \("):
        make(config(pictures, own, ON_DISK, data={"resize_interpolation": "nearest"}))
    with pytest.raises(ConfigFault, match=rf"--regenerate_cache: {re.escape(str(own))} .*--cache_dir"):
        make(config(pictures, own, {**ON_DISK, "regenerate": True}))
    assert snapshot(own) == before and not calls


def test_a_disk_that_failed_once_is_asked_again_at_the_next_start(
    pictures: Path, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from difftrain.data.index.index import Index

    cfg, read = config(pictures, tmp_path, {"latents_to_disk": True}), Index.read

    def failing(index: Index, media: Any) -> bytes:
        if media.path.endswith("0001.png"):
            raise OSError(5, "the disk fails")
        return read(index, media)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "read", failing)
        made = make(cfg)
    (reject,) = made.rejects
    assert reject.path.endswith("0001.png") and "the disk fails" in reject.reason
    named = {each.path for batch in made.batches(4) for each in batch.rejects}
    assert named == {reject.path} and not use_of(tmp_path).complete
    calls.clear()
    assert not make(cfg).rejects and calls == [4] and use_of(tmp_path).complete
    assert make(cfg).kept().equal(make(config(pictures, tmp_path, {"latents": True})).kept())
