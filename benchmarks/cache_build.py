"""Building a cache over a bare loop of the same encoders on ready tensors: real JPEGs of one megapixel, in turns.

    python benchmarks/cache_build.py            some minutes on two cores

Both sides run the tiny SDXL's encoders in this process with one thread. The bare loop encodes tensors that lie ready and
keeps nothing. The build does all that a start does: it tells the encoders by their weights, lists what is wanted, plans,
decodes in one loader worker, encodes, writes and syncs segments, and merges them; the data's index is made before. The
encoder must be fast (at most 20 ms a picture), else nothing is measured. Then a start with a complete cache of --entries
entries is timed. Judged by the median of the rounds' ratios. Exit code 1 where a limit is passed.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import numpy as np
import torch
from photographs import write_pieces

from difftrain.cache import build
from difftrain.cache.build import with_cache
from difftrain.cache.decoding import DecodingDataset
from difftrain.cache.manifest.manifest import CacheManifest
from difftrain.cache.request import cache_requests
from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.format import PackedEntry, pack
from difftrain.cache.store.segment import SegmentWriter
from difftrain.cache.store.storage import stored
from difftrain.config import TrainConfig
from difftrain.contracts import Batch
from difftrain.data.prepare import Data, open_data, prepare
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.models.registry import make_family

MOST_MS = 20.0  # of the encoder, a picture
LIMIT = 1.10
RECHECK_S = 10.0


def config(folder: Path, cache: Path, options: argparse.Namespace) -> TrainConfig:
    """Return a configuration of the tiny model that caches everything on disk, with the defaults that users get."""
    side = options.resolution
    return TrainConfig.model_validate(
        {
            "model": {"init_from_config": "tiny"},
            "data": {"dirs": (str(folder),), "resolution": (side, side), "workers": 1, "cache_dir": str(cache)},
            "cache": {"latents_to_disk": True, "text_to_disk": True},
            "training": {"batch_size": options.batch_size, "seed": 1},
        }
    )


class Bench:
    """The data, the encoders, and both ways to use them."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.cfg = config(folder / "pictures", folder / "cache", options)
        self.family = make_family(self.cfg)
        self.data: Data = open_data(self.cfg, prepare(self.cfg, log=lambda line: None))
        self.parts = self.family.load()
        self.tokenize = self.family.tokenizer(self.parts)

    def build_s(self) -> float:
        """Build from nothing but the index; return the seconds."""
        for path in ("segments", "uses", "drops", "metadata.db", "cache.json", "rejected.jsonl"):
            target = self.folder / "cache" / path
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        for path in self.data.index.folder.glob("wanted-*"):
            shutil.rmtree(path)
        return self.start_s()

    def start_s(self) -> float:
        """Do what a start does with its cache; return the seconds."""
        began = time.perf_counter()
        with_cache(self.cfg, choose("cpu"), Ranks(), self.family, self.parts, self.data)
        return time.perf_counter() - began

    def ready(self) -> list[tuple[Any, Batch]]:
        """Return every batch of every encoder, decoded; and say what decoding takes."""
        found = []
        asked = cache_requests(self.cfg, self.family, self.parts, self.data)
        listed = build._manifests(self.cfg, Ranks(), self.data, asked, self.tokenize)
        for each in listed:
            decoding = DecodingDataset(self.data, each.manifest, self.tokenize)
            began = time.perf_counter()
            batches = [decoding[n].batch for n in range(len(decoding))]
            took = time.perf_counter() - began
            print(
                f"decoding for {each.request.name}: {1000 * took / each.manifest.count:.1f} ms an entry, in one process"
            )
            found += [(each.request.encoder, batch) for batch in batches]
        return found


@torch.no_grad()
def bare_s(ready: list[tuple[Any, Batch]]) -> tuple[float, float]:
    """Run the encoders alone; return the seconds of all, and of those for pictures."""
    began, pictures = time.perf_counter(), 0.0
    for encoder, batch in ready:
        start = time.perf_counter()
        encoder.encode(batch)
        pictures += (time.perf_counter() - start) * ("pixels" in encoder.source)
    return time.perf_counter() - began, pictures


def recheck(bench: Bench, entries: int) -> float:
    """Time the look at a complete cache with `entries` more entries, all of them wanted."""
    folder = CacheFolder.open(bench.folder / "cache")
    rng = np.random.default_rng(0)
    addresses = rng.bytes(16 * entries)
    pieces = pack([stored("moments", torch.zeros(8), "float32")], {"name": "none"})
    with_items = [PackedEntry(addresses[i : i + 16], pieces) for i in range(0, len(addresses), 16)]
    writer = SegmentWriter(folder, {"encoder": "latents", "fingerprint": "", "features": {}})
    for start in range(0, entries, 1000):
        writer.append(with_items[start : start + 1000])
    writer.close()
    listed = next(path for path in bench.data.index.folder.glob("wanted-latents-*"))
    wanted = CacheManifest(listed)
    more = np.concatenate([np.asarray(wanted.addresses), np.frombuffer(addresses, "V16")])
    np.save(listed / "addresses.npy", more)
    facts = (listed / "facts.json").read_text()
    ((bucket, count),) = CacheManifest(listed).buckets()
    (listed / "facts.json").write_text(facts.replace(f"], {count}]]", f"], {count + entries}]]"))
    assert CacheManifest(listed).count == count + entries, bucket
    bench.start_s()  # merges what was written
    return bench.start_s()


def main() -> int:
    """Measure, print, and say whether the limits are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=360)
    parser.add_argument("--resolution", type=int, default=240)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--verbose", action="store_true", help="print what a start says")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="cache-build-") as name:
        folder = Path(name)
        count = write_pieces(folder / "pictures", options.pictures)
        if not count:
            print("no photographs can be had here; nothing is measured")
            return 1
        bench = Bench(folder, options)
        ready = bench.ready()
        bare_s(ready[:8])
        took: list[tuple[float, float, float]] = []
        for _ in range(options.rounds):
            (bare, pictures), built = bare_s(ready), bench.build_s()
            took.append((built, bare, pictures))
            print(f"build {built:.2f} s, bare {bare:.2f} s: {built / bare:.3f}")
        again = recheck(bench, options.entries)
    ratio = statistics.median(built / bare for built, bare, _ in took)  # pairs: the machine's own pace drifts
    built, bare, pictures = map(min, zip(*took))
    each = 1000 * pictures / count
    good = ratio <= LIMIT and each <= MOST_MS and again < RECHECK_S
    print(
        f"building over the bare encoders: {ratio:.3f} (limit {LIMIT}; smallest {built:.2f} against {bare:.2f} s), {count} JPEGs of one megapixel"
    )
    print(f"encoder: {each:.1f} ms a picture (limit {MOST_MS:g})")
    print(f"a start with a complete cache of {options.entries:,} entries: {again:.2f} s (limit {RECHECK_S:g})")
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
