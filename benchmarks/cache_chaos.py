"""Kill writers of a feature cache at random moments, and look whether anything was lost, torn or changed.

    python benchmarks/cache_chaos.py                200 rounds, some minutes
    python benchmarks/cache_chaos.py --rounds=12    the same in seconds

A round starts three launches on one cache. Each looks up what is committed, works through what is missing in an order of
its own, in batches of fixed composition, and says over a pipe what it has committed, once `append` has returned. Each of
them is killed with SIGKILL at a moment of its own. Then every entry that is served must be what was written, and every
entry that was ever said to be committed must be there. A cache that is complete is compared with that of an unbroken
build: equal sets of (address, hash of the payload); the next round begins with an empty one.
Exit code 1 at the first difference; moments come from the seed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import numpy as np

from difftrain.cache.store import journals
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.format import PackedEntry, StoredFeature, crc32c, pack, reject
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.store.segment import SegmentWriter

LAUNCHES = 3
BATCH = 6  # items that are committed at once
SEGMENT_BYTES = 200_000  # so that segments are sealed all the time
MERGE_EVERY = 9  # batches
LONGEST_S = 0.35  # from the first commit of a launch to its end, at most


def address(number: int) -> bytes:
    """Return the address of an item."""
    return hashlib.blake2b(f"item {number}".encode(), digest_size=16).digest()


def item(number: int) -> PackedEntry:
    """Return what an encoder makes of an item: always the same; of some it can make nothing."""
    if number % 50 == 7:
        return reject(address(number), f"{number}.jpg", "cut short")
    bits = np.random.Generator(np.random.Philox(key=number))
    size = int(bits.integers(1, 12_000))
    data = np.frombuffer(bits.bytes(size), np.uint8)
    return PackedEntry(
        address(number), pack([StoredFeature("latents", "uint8", (size,), size, data)], {"name": f"{number}.jpg"})
    )


def hash_of(content: bytes) -> str:
    """Return the hash of a payload."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def write(root: Path, items: int, seed: int) -> None:
    """Be one launch: commit what is missing, and say so on standard output after each commit."""
    folder = CacheFolder.open(root, create=True)
    merge(folder)
    batches = [range(start, min(start + BATCH, items)) for start in range(0, items, BATCH)]
    random.Random(seed).shuffle(batches)
    there = there_of(folder, items)
    writer = SegmentWriter(folder, {"encoder": "latents", "fingerprint": "0" * 32}, segment_bytes=SEGMENT_BYTES)
    tell("begin")
    for count, batch in enumerate(batches, start=1):
        missing = [number for number in batch if not there[number]]
        writer.append([item(number) for number in missing])
        tell(json.dumps(missing))
        if count % MERGE_EVERY == 0:
            merge(folder)
            there = there_of(folder, items)  # the other launches have committed meanwhile
    writer.close()
    merge(folder)
    tell("end")


def there_of(folder: CacheFolder, items: int) -> list[bool]:
    """Tell which items are committed."""
    asked = np.frombuffer(b"".join(address(number) for number in range(items)), "V16")
    found: list[bool] = Metadata(folder.database).has_many(asked).tolist()
    return found


def tell(line: str) -> None:
    """Write a line to the parent: a pipe takes a short one whole, also when the writer is killed after it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def served(folder: CacheFolder) -> dict[str, str]:
    """Return address and hash of every entry that is served. Raises ValueError where one is torn."""
    import sqlite3

    with contextlib.closing(sqlite3.connect(f"file:{folder.database}?mode=ro&immutable=1", uri=True)) as db:
        addresses = [row[0] for row in db.execute("SELECT address FROM entries")]
    metadata = Metadata(folder.database)
    found = {}
    for each in addresses:
        row = metadata.lookup(each)
        assert row is not None
        with folder.open_file(row.segment, BIN) as file:
            file.seek(row.offset)
            content = file.read(row.length)
        if len(content) != row.length or crc32c(content) != row.crc:
            raise ValueError(f"{row.segment}:{row.offset}: a torn record of {row.length} bytes is served")
        found[each.hex()] = hash_of(content)
    return found


@dataclass
class Drill:
    """Rounds on one cache after another."""

    scratch: Path
    items: int
    chance: random.Random
    unbroken: dict[str, str] = field(default_factory=dict)
    said: set[int] = field(default_factory=set)  # items that some launch has committed, in the present cache
    counts: Counter[str] = field(default_factory=Counter)
    caches: int = 0

    def begin(self) -> None:
        """Build without a kill what all others are compared with."""
        whole = CacheFolder.open(self.scratch / "unbroken", create=True)
        process = self.launch(whole.path, 0)
        process.communicate(timeout=300)
        if process.returncode != 0:
            raise SystemExit("an unbroken build failed")
        self.unbroken = served(whole)
        wanted = {address(n).hex(): hash_of(b"".join(map(bytes, item(n).pieces))) for n in range(self.items)}
        if self.unbroken != wanted:
            raise SystemExit("an unbroken build does not hold what was written")

    def launch(self, root: Path, seed: int) -> subprocess.Popen[str]:
        """Start a writer."""
        command = [sys.executable, __file__, f"--write={root}", f"--items={self.items}", f"--seed={seed}"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def round(self) -> str:
        """Start three launches, kill them, and check; return what is wrong, or nothing."""
        root = self.scratch / f"cache{self.caches}"
        launches = [self.launch(root, self.chance.randrange(1 << 30)) for _ in range(LAUNCHES)]
        if self.chance.random() < 0.1:  # while they start
            ends = [time.monotonic() + self.chance.uniform(0, LONGEST_S) for _ in launches]
        else:
            first = [process.stdout.readline() for process in launches if process.stdout is not None]
            self.counts["begun"] += sum(line == "begin\n" for line in first)
            ends = [time.monotonic() + self.chance.uniform(0, LONGEST_S) for _ in launches]
        for end, process in sorted(zip(ends, launches), key=lambda pair: pair[0]):
            time.sleep(max(0.0, end - time.monotonic()))
            process.send_signal(signal.SIGKILL)
        for process in launches:
            self.hear(process)
        return self.check(CacheFolder.open(root, create=True))

    def finish(self) -> str:
        """Let one launch end what the killed ones have begun, however slow the machine is; check it."""
        root = self.scratch / f"cache{self.caches}"
        self.hear(self.launch(root, 0))
        return self.check(CacheFolder.open(root))

    def hear(self, process: subprocess.Popen[str]) -> None:
        """Read what a launch said until it was killed."""
        heard, _ = process.communicate(timeout=300)
        self.counts["killed" if process.returncode == -signal.SIGKILL else "ended"] += 1
        if process.returncode not in (0, -signal.SIGKILL):
            raise SystemExit(f"a launch failed with exit code {process.returncode}")
        for line in heard.splitlines(keepends=True):
            if line.startswith("[") and line.endswith("]\n"):
                self.said.update(json.loads(line))
                self.counts["commits"] += 1

    def check(self, folder: CacheFolder) -> str:
        """Compare what is served with what was written, and with what was said to be committed."""
        if folder.database.exists():
            journals.check(folder.database)  # as a launch was killed at it
        merged = merge(folder)
        if merged.notes or merged.rebuilt:
            return f"the index says: {merged.rebuilt} {' '.join(merged.notes)}"
        try:
            found = served(folder)
        except ValueError as error:
            return str(error)
        if lost := missing(self.said, found):
            return f"{len(lost)} committed records are lost, item {lost[0]} is one of them"
        if changed := [each for each, content in found.items() if self.unbroken.get(each) != content]:
            return f"{len(changed)} records are not what was written, {changed[0]} is one of them"
        self.counts["checked"] += len(found)
        if len(found) == self.items:
            return self.complete(folder, found)
        return ""

    def complete(self, folder: CacheFolder, found: dict[str, str]) -> str:
        """Compare a complete cache with the unbroken one, also with its index made from nothing."""
        anew = folder.path / "anew.db"
        count = merge(folder, anew).entries
        if found != self.unbroken or count != self.items:
            return "a complete cache differs from that of an unbroken build"
        rejected = [json.loads(line)["path"] for line in folder.rejects.read_text(encoding="utf-8").splitlines()]
        if sorted(rejected) != sorted(f"{number}.jpg" for number in range(7, self.items, 50)):
            return "rejected.jsonl differs from what was rejected"
        self.counts["complete"] += 1
        self.caches += 1
        self.said.clear()
        return ""


def missing(said: Iterable[int], found: dict[str, str]) -> list[int]:
    """Return the items that were committed and are not served."""
    return sorted(number for number in said if address(number).hex() not in found)


def main() -> int:
    """Run the rounds, or be one of their launches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--items", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.write is not None:
        write(wanted.write, wanted.items, wanted.seed)
        return 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="difftrain-cache-chaos-") as scratch:
        drill = Drill(Path(scratch), wanted.items, random.Random(wanted.seed))
        drill.begin()
        for number in range(wanted.rounds):
            if wrong := drill.round():
                print(f"FAIL  round {number}: {wrong}", flush=True)
                return 1
        if wrong := drill.finish():
            print(f"FAIL  last build: {wrong}", flush=True)
            return 1
        counts = drill.counts
    print(f"{wanted.rounds} rounds in {time.monotonic() - start:.0f} s, seed {wanted.seed}: {dict(counts)}")
    if not (counts["complete"] and counts["killed"] > wanted.rounds and counts["commits"] > wanted.rounds):
        print("FAIL  too little happened between the kills: nothing is proven")
        return 1
    print("PASS  0 torn records served, 0 committed records lost, complete caches equal to that of an unbroken build")
    return 0


if __name__ == "__main__":
    sys.exit(main())
