"""Kills in the middle of a clean-up or a repair: no committed entry that is wanted is lost, and the next one finishes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_caches import WANTED, address, assert_whole, flip, partly_wanted, served

from difftrain.cache.store import segment as writer
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.index import Metadata
from difftrain.cache.tools import gc
from difftrain.cache.tools.repair import repair


class Killed(BaseException):
    """What no code catches."""


CALLS = ("unlink", "rename", "replace", "fsync", "open", "rmdir", "writev")


@pytest.fixture
def kill_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], pytest.MonkeyPatch]]:
    """Return what makes the n-th call that changes a file raise; it lasts until it is undone."""

    def arm(calls: int) -> pytest.MonkeyPatch:
        left = [calls]

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **words: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return real(*args, **words)

            return call

        for name in CALLS:
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
        monkeypatch.setattr(writer, "_sync", counted(writer._sync))
        return monkeypatch

    yield arm
    monkeypatch.undo()


@pytest.mark.parametrize("tool", ["gc", "repair"])
def test_killed_anywhere_it_loses_nothing_and_can_be_run_again(
    tool: str, tmp_path: Path, kill_after: Callable[[int], pytest.MonkeyPatch]
) -> None:
    ended = False
    for calls in range(0, 400, 2):
        folder = partly_wanted(tmp_path / f"{calls}")
        originals, kept = served(folder), WANTED
        if tool == "repair":
            kept = damaged(folder)
        patched = kill_after(calls)
        try:
            for _ in gc.collect_garbage(folder) if tool == "gc" else repair(folder):
                pass
            ended = True
        except Killed:
            pass
        finally:
            patched.undo()
        if tool == "gc":
            assert_whole(folder, kept, originals)
        list(repair(folder))
        list(gc.collect_garbage(folder))
        assert_whole(folder, kept, originals)
        if ended:
            return
    pytest.fail("it does not end")


def damaged(folder: CacheFolder) -> set[int]:
    """Damage two segments, one of them in its journal; return what is wanted and whole."""
    known = Metadata(folder.database)
    places = {number: known.lookup(address(number)) for number in WANTED}
    flip(folder.file(places[10].segment, ".idx"), -10)  # its last row, which nothing wants
    flip(folder.file(places[20].segment, BIN), places[20].offset + 70)
    return WANTED - {20}
