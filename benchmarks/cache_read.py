"""Reading a sample from the feature cache over other ways to keep it: files of three kinds, and memory.

    python benchmarks/cache_read.py           a minute, 2 GB of disk

Samples are SD3-Light's at 256 px: latents 16 x 32 x 32, T5 256 x 4096, CLIP 77 x 768 and 77 x 1280 with their pooled
vectors, all in bf16, 2.45 MB. In the cache they are four entries, one of each encoder; the others keep a sample in one
file. The cache and one of the others read samples in random order and in turns, in one process, after each was read once;
what is printed is the median of the ratios of neighbouring reads. A file's tensors are mapped rather than read by
safetensors, so each of them is copied, as a batch does; only touching a number of each of their pages is printed too. The reader remembers where some thousand entries lie; what a look
into the index adds for others is printed too. Exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import numpy as np
import safetensors.torch
import torch

from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.format import PackedEntry, pack
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.store.memory import Verified
from difftrain.cache.store.read import Reader
from difftrain.cache.store.segment import SegmentFiles, SegmentWriter
from difftrain.cache.store.storage import kept_rows, stored
from difftrain.contracts import Bucket, Feature

BUCKET = Bucket(256, 256)
BF16 = "bfloat16"
ENCODERS = {
    "latents": {"latents": Feature(16, factor=8, dtype=BF16)},
    "text_encoder_1": {"hidden_1": Feature(768, length=77, dtype=BF16), "pooled_1": Feature(768, dtype=BF16)},
    "text_encoder_2": {"hidden_2": Feature(1280, length=77, dtype=BF16), "pooled_2": Feature(1280, dtype=BF16)},
    "text_encoder_3": {"hidden_3": Feature(4096, length=256, dtype=BF16, maskable=True)},
}
LIMITS = {"torch.load": 3.0, "npz": 4.5, "safetensors": 1.3, "touched": 0.0, "clone": 0.70}
FP8_LIMIT, MASKED_LIMIT = 0.52, 0.25
CAPTION_TOKENS = 25

Sample = dict[str, torch.Tensor]


def sample(generator: torch.Generator) -> Sample:
    """Return made-up features of one sample."""
    return {
        name: torch.randn(feature.shape(BUCKET), generator=generator).to(torch.bfloat16)
        for features in ENCODERS.values()
        for name, feature in features.items()
    }


def address(encoder: str, number: int) -> bytes:
    """Return an address as random as a real one, so that neighbours in the index are none in the segments."""
    return random.Random(f"{encoder} {number}").randbytes(16)


def size_of(made: Mapping[str, torch.Tensor], dtype: str, rows: int | None = None) -> int:
    """Return the bytes of a sample's entries; rows: those of T5 that a mask keeps."""
    total = 0
    for features in ENCODERS.values():
        some = [stored(name, _cut(name, made[name], rows), dtype, _rows(name, rows)) for name in features]
        total += sum(memoryview(piece).nbytes for piece in pack(some, {"name": "folder/picture.jpg"}))
    return total


def _rows(name: str, rows: int | None) -> int | None:
    return rows if name == "hidden_3" else None


def _cut(name: str, value: torch.Tensor, rows: int | None) -> torch.Tensor:
    """Set rows behind the mask to zeros, as an encoder with a mask does."""
    if _rows(name, rows) is None:
        return value
    value = value.clone()
    value[rows:] = 0
    return value


def fill(folder: Path, samples: list[Sample]) -> Callable[[int], Sample]:
    """Put samples into a cache; return what reads one."""
    cache = CacheFolder.open(folder, create=True)
    for encoder, features in ENCODERS.items():
        writer = SegmentWriter(cache, {"encoder": encoder})
        for number, made in enumerate(samples):
            some = [stored(name, made[name], BF16) for name in features]
            writer.append([PackedEntry(address(encoder, number), pack(some, {"name": f"{number}.jpg"}))])
        writer.close()
    merge(cache)
    metadata, source = Metadata(cache.database), SegmentFiles(cache)
    verified = Verified(Verified.reserve(metadata.count), metadata.generation)
    readers = {
        encoder: Reader(source, metadata, features, verified, cache=str(folder))
        for encoder, features in ENCODERS.items()
    }
    known = {(encoder, number): address(encoder, number) for encoder in ENCODERS for number in range(len(samples))}

    def read(number: int) -> Sample:
        found: Sample = {}
        for encoder, reader in readers.items():
            found |= reader.read([known[encoder, number]])
        return found

    return read


def others(folder: Path, samples: list[Sample]) -> dict[str, Callable[[int], Any]]:
    """Put samples into files of their own, and leave them in memory; return what reads one, by name."""
    for number, made in enumerate(samples):
        torch.save(made, folder / f"{number}.pt")
        safetensors.torch.save_file(made, folder / f"{number}.safetensors")
        np.savez(folder / f"{number}.npz", **{name: each.view(torch.uint16).numpy() for name, each in made.items()})

    def npz(number: int) -> Sample:
        with np.load(folder / f"{number}.npz") as file:
            return {name: torch.from_numpy(file[name]).view(torch.bfloat16) for name in file.files}

    def mapped(number: int) -> Sample:
        found = safetensors.torch.load_file(folder / f"{number}.safetensors")
        return {name: each.clone() for name, each in found.items()}

    def touched(number: int) -> tuple[Sample, float]:
        found = safetensors.torch.load_file(folder / f"{number}.safetensors")
        return found, sum(float(each.view(torch.int16).flatten()[::2048].sum()) for each in found.values())

    return {
        "torch.load": lambda number: torch.load(folder / f"{number}.pt", weights_only=True),
        "npz": npz,
        "safetensors": mapped,
        "touched": touched,
        "clone": lambda number: {name: each.clone() for name, each in samples[number].items()},
    }


def seconds(read: Callable[[int], Any], number: int) -> float:
    """Return how long a read takes; giving its memory back is not in it."""
    began = time.perf_counter()
    found = read(number)
    took = time.perf_counter() - began
    del found
    return took


def in_turns(ours: Callable[[int], Any], theirs: Callable[[int], Any], options: argparse.Namespace) -> list[Any]:
    """Return the seconds of reads of ours and theirs, pair by pair; which is first changes."""
    pairs = []
    for turn in range(options.rounds):
        numbers = random.sample(range(options.samples), 2)
        if turn % 2:
            second = seconds(theirs, numbers[1])
            pairs.append((seconds(ours, numbers[0]), second))
        else:
            pairs.append((seconds(ours, numbers[0]), seconds(theirs, numbers[1])))
    return pairs


def look_up(folder: Path, options: argparse.Namespace) -> float:
    """Return the seconds of a look into the index."""
    metadata = Metadata(CacheFolder.open(folder).database)
    took = []
    for _ in range(options.rounds):
        asked = address(random.choice(list(ENCODERS)), random.randrange(options.samples))
        began = time.perf_counter()
        metadata.lookup(asked)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def check(read: Callable[[int], Sample], samples: list[Sample]) -> list[float]:
    """Read everything once, in random order, compare it bit by bit, and return the seconds of each read."""
    took: list[float] = []
    for number in random.sample(range(len(samples)), len(samples)):
        began = time.perf_counter()
        found = read(number)
        took.append(time.perf_counter() - began)
        for name, value in samples[number].items():
            if not torch.equal(found[name][0].view(torch.int16), value.view(torch.int16)):
                raise SystemExit(f"sample {number}: {name} is not what was stored")
    return took


def main() -> int:
    """Measure, print, and say whether the limits are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where to put the files; else the temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    samples = [sample(generator) for _ in range(options.samples)]
    with tempfile.TemporaryDirectory(prefix="cache-read-", dir=options.folder) as name:
        folder = Path(name)
        ours = fill(folder / "cache", samples)
        ways = others(folder, samples)
        os.sync()  # or it goes on while reads are measured
        first = check(ours, samples)
        again = check(ours, samples)
        for read in ways.values():
            for number in range(options.samples):
                read(number)
        took = {way: in_turns(ours, read, options) for way, read in ways.items()}
        look_s = look_up(folder / "cache", options)
    size = sum(each.nbytes for each in samples[0].values())
    print(f"{options.samples} samples of {size / 1e6:.2f} MB, {options.rounds} rounds")
    good = True
    for way, limit in LIMITS.items():
        ratio = statistics.median(theirs / mine for mine, theirs in took[way])
        mine_us, theirs_us = (1e6 * statistics.median(each) for each in zip(*took[way], strict=True))
        good &= ratio >= limit
        said = f"limit {limit:g}; " if limit else ""
        print(f"{way:12} over the cache: {ratio:5.2f} ({said}{theirs_us:.0f} over {mine_us:.0f} us)")
    print(
        f"first reads, checksum included: {1e6 * statistics.median(first):.0f} us; the same once more, each compared: "
        f"{1e6 * statistics.median(again):.0f} us; a look into the index: {1e6 * look_s:.1f} us, {len(ENCODERS)} a sample"
    )
    plain = size_of(samples[0], BF16)
    mask = torch.arange(256) < CAPTION_TOKENS
    for said, limit, other in (
        ("fp8", FP8_LIMIT, size_of(samples[0], "float8_e4m3fn")),
        (f"T5's mask, {CAPTION_TOKENS} tokens", MASKED_LIMIT, size_of(samples[0], BF16, kept_rows(mask))),
    ):
        good &= other <= limit * plain
        print(f"bytes a sample, {said}: {other:,} of bf16's {plain:,}, {other / plain:.3f} (limit {limit:g})")
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
