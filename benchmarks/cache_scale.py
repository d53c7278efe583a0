"""The index of a feature cache of ten million entries: opened, looked into, brought up to date.

    python benchmarks/cache_scale.py                      10 million entries, minutes and 3 GB in the temporary folder
    python benchmarks/cache_scale.py --records=200000     the same checks in seconds

The segments are as many as features of 2.45 MB a sample fill; their payloads are holes in sparse files. Prints each
figure beside its limit, PASS or FAIL. Exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import numpy as np
from figures import Report

from difftrain.cache.store.folder import BIN, IDX, CacheFolder
from difftrain.cache.store.format import ROW, header_block, row_crcs
from difftrain.cache.store.index import Metadata, merge

SAMPLE_BYTES = 2_450_000
IN_A_SEGMENT = (1 << 30) // SAMPLE_BYTES
LOOKUPS = 100_000


def addresses(first: int, count: int) -> np.ndarray:
    """Return the addresses of some entries. Shapes: (count, 2) uint64."""
    bits = np.random.Philox(key=7)
    bits.advance((first + 1) // 2)  # a step makes four words
    if first % 2:
        raise ValueError("entries are made in pairs")
    return bits.random_raw(2 * count).reshape(count, 2)


def write_segments(folder: CacheFolder, first: int, count: int, launch: str) -> None:
    """Write journals of entries and sparse payloads, as a build would have left them."""
    for number, start in enumerate(range(first, first + count, IN_A_SEGMENT)):
        rows = np.zeros(min(IN_A_SEGMENT, first + count - start), ROW)
        name = f"seg-{launch * 32}-{number:06d}"
        header = header_block({"segment": name, "encoder": "latents", "fingerprint": "0" * 32})
        rows["address"] = addresses(start, len(rows)).astype(">u8").view("V16").reshape(-1)
        stride = -(-SAMPLE_BYTES // 64) * 64
        rows["offset"] = len(header) + np.arange(len(rows)) * stride
        rows["length"] = SAMPLE_BYTES
        rows["row_crc"] = row_crcs(rows)
        (folder.segments / f"{name}{IDX}").write_bytes(header + rows.tobytes())
        with (folder.segments / f"{name}{BIN}").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + len(rows) * stride)


def timed(call: Callable[[], object]) -> float:
    """Return seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident_mib(field: str = "VmRSS") -> float:
    """Return this process's memory: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def worker(path: Path, records: int, answers: multiprocessing.Queue[dict[str, float]]) -> None:
    """Open the index in a process of its own and look entries up all over it."""
    before = resident_mib()
    metadata = Metadata(path)
    known = addresses(0, 2).astype(">u8").tobytes()
    opening = timed(lambda: (metadata.count, metadata.lookup(known[:16])))
    rng = np.random.default_rng(3)
    asked = [addresses(2 * int(i), 1).astype(">u8").tobytes() for i in rng.integers(0, records // 2, LOOKUPS)]
    took = []
    for address in asked:
        start = time.perf_counter()
        found = metadata.lookup(address)
        took.append(time.perf_counter() - start)
        if found is None:
            raise SystemExit(f"entry {address.hex()} is missing")
    absent = os.urandom(16)
    if metadata.lookup(absent) is not None:
        raise SystemExit("an entry is there that was never written")
    quantile = float(np.quantile(took, 0.99)) * 1e6
    median = statistics.median(took) * 1e6
    answers.put({"open": opening, "median": median, "p99": quantile, "rss": resident_mib(), "before": before})


def in_a_process(target: Callable[..., None], *args: object) -> dict[str, float]:
    """Run a measurement in a fresh process."""
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[dict[str, float]] = context.Queue()
    process = context.Process(target=target, args=(*args, answers))
    process.start()
    made = answers.get(timeout=3600)
    process.join()
    return made


def merging(root: Path, answers: multiprocessing.Queue[dict[str, float]]) -> None:
    """Bring the index up to date."""
    folder = CacheFolder.open(root)
    start = time.perf_counter()
    merged = merge(folder)
    took = time.perf_counter() - start
    answers.put({"s": took, "added": merged.added, "entries": merged.entries, "most": resident_mib("VmHWM")})


def check_presence(report: Report, metadata: Metadata, records: int) -> None:
    """Time the walk over what a configuration wants: some entries, and all of them."""
    for count in (100_000, 1_000_000, records):
        if count > records:
            continue
        wanted = addresses(0, count).astype(">u8").view("V16").reshape(-1)
        missing = np.random.default_rng(5).bytes(16 * 100)
        asked = np.concatenate([wanted, np.frombuffer(missing, "V16")])
        start = time.perf_counter()
        there = metadata.has_many(asked)
        took = time.perf_counter() - start
        if not there[:count].all() or there[count:].any():
            raise SystemExit("has_many is wrong")
        if count == 100_000:
            report.check(f"presence of {count:,} entries", took, 10.0, "s")
        else:
            report.log(f"presence of {count:,} entries", took, "s")


def main() -> int:
    """Write a synthetic cache, measure, and tell whether all limits were kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000_000)
    wanted = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="difftrain-cache-scale-"))
    report = Report()
    try:
        folder = CacheFolder.open(root, create=True)
        report.log("synthetic journals", timed(lambda: write_segments(folder, 0, wanted.records, "a")), "s")
        built = in_a_process(merging, root)
        note = f"{built['added'] / built['s'] / 1e6:.2f} M entries/s, at most {built['most']:.0f} MiB resident"
        report.log(f"index of {built['entries']:,} entries from nothing", built["s"], "s", note)
        report.log("its size a record", folder.database.stat().st_size / wanted.records, "B")
        found = in_a_process(worker, folder.database, wanted.records)
        report.check("open, first look-up", found["open"], 1.0, "s")
        report.check("look-up, median", found["median"], 50.0, "us", f"99 % below {found['p99']:.1f}")
        report.check("resident a worker", found["rss"], 200.0, "MiB", f"{found['before']:.0f} before it was opened")
        check_presence(report, Metadata(folder.database), wanted.records)
        report.log("merge with nothing new", in_a_process(merging, root)["s"], "s")
        write_segments(folder, wanted.records, 100_000, "b")
        more = in_a_process(merging, root)
        if more["added"] != 100_000:
            raise SystemExit(f"{more['added']} entries were added, not 100000")
        report.log("merge of 100,000 more", more["s"], "s", f"at most {more['most']:.0f} MiB resident")
        found = in_a_process(worker, folder.database, wanted.records)
        report.check("look-up after it, median", found["median"], 50.0, "us", f"99 % below {found['p99']:.1f}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
