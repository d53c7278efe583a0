"""Memory that is shared with processes that were not forked from the one that made it."""

from __future__ import annotations

import multiprocessing

import pytest
from entries import FEATURES, item, read_and_mark, sample

from difftrain.cache.store.memory import MemoryEntries, MemorySink, Verified
from difftrain.cache.store.read import Reader
from difftrain.cache.store.segment import SegmentFiles


def test_a_process_of_its_own_reads_and_marks_what_is_shared():
    verified = Verified(Verified.reserve(40), "one")
    verified.add(39)
    sink = MemorySink()
    sink.append([item(number) for number in range(4)])
    reader = Reader(SegmentFiles(None), MemoryEntries(MemoryEntries.reserve([sink.rows()])), FEATURES, None)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    worker = context.Process(target=read_and_mark, args=(reader, [2, 3], verified, [0, 7, 8], answers))
    worker.start()
    seen, total = answers.get(timeout=60)
    worker.join(60)
    assert seen == [0, 7, 8, 39] == [number for number in range(40) if verified.has(number)]
    assert total == pytest.approx(float((sample(2)["map"] + sample(3)["map"]).sum()), abs=1e-4)
