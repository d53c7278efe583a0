"""Builds, readers and all tools at work on one cache: nothing that is wanted goes, nothing whole is called damaged."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from small_caches import address, make, want, write

from difftrain.cache.store import references
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.format import crc32c
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.tools import gc
from difftrain.cache.tools.repair import repair
from difftrain.cache.tools.verify import verify
from difftrain.contracts import DataFault

SECONDS = 6.0
PATIENCE_S = 10.0  # for what a clean-up takes back, on a machine with other work


def build_and_read(folder: CacheFolder, seed: int, end: float) -> None:
    """Want one set of entries after another, encode what is missing, read all of it, forget it again."""
    chance, rounds = random.Random(seed), 0
    while time.monotonic() < end:
        numbers = chance.sample(range(60), chance.randrange(5, 40))
        want(folder, f"{seed}x{rounds}", numbers, whole=False)
        merge(folder)
        known = Metadata(folder.database)
        missing = [number for number in numbers if known.lookup(address(number)) is None]
        if missing:
            write(folder, missing)
        merge(folder)
        for number in numbers:
            assert readable(folder, number), f"{number} is lost"
        references.remove(folder, f"{seed}x{rounds}")
        rounds += 1
    assert rounds > 2


def readable(folder: CacheFolder, number: int) -> bool:
    """Read an entry as training does: with the index anew where files have gone."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            row = Metadata(folder.database).lookup(address(number))
            if row is not None:
                with folder.open_file(row.segment, BIN) as file:
                    file.seek(row.offset)
                    assert crc32c(file.read(row.length)) == row.crc
                return True
        time.sleep(0.02)
    return False


def clean_up(folder: CacheFolder, seed: int, end: float) -> None:
    while time.monotonic() < end:
        with suppress(DataFault):  # none may be known for a moment
            list(gc.collect_garbage(folder))


def look(folder: CacheFolder, seed: int, end: float) -> None:
    while time.monotonic() < end:
        report = verify(folder)
        assert not report.damages, [str(damage) for damage in report.damages]
        assert list(repair(folder))[-1].startswith(f"{folder.path}: ")


def test_everything_at_once(tmp_path: Path) -> None:
    folder, context = make(tmp_path / "c"), get_context("fork")
    end = time.monotonic() + SECONDS
    roles = [build_and_read, build_and_read, clean_up, clean_up, look]
    processes = [context.Process(target=role, args=(folder, seed, end)) for seed, role in enumerate(roles)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS + 60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(roles)
    assert not verify(folder).damages
