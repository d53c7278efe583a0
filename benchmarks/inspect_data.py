"""Looking at 100,000 pictures: `difftrain dataset inspect` within 60 s and 8 MB, the index built from nothing.

    python benchmarks/inspect_data.py                    100,000 pictures in ten tars, 400 MB in the temporary folder
    python benchmarks/inspect_data.py --records=2000     the same in seconds

Prints seconds and bytes beside their limits, PASS or FAIL, and a ratio: the whole inspection over only reading every
byte of the tars once. Exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import numpy as np
from PIL import Image

from difftrain.config import TrainConfig
from difftrain.train.inspect import inspect

TARS = 10
SIZES = [(w, h) for w in range(160, 640, 32) for h in range(160, 640, 32)]
LIMIT_S, LIMIT_BYTES = 60.0, 8_000_000
WORDS = (
    "a", "the", "of", "photo", "painting", "dog", "cat", "tree", "house", "river", "mountain",
    "red", "green", "blue", "light", "dark", "soft", "old", "new", "small",
)  # fmt: skip


def pictures() -> Iterator[tuple[bytes, str]]:
    """Yield JPEGs of a few hundred sizes, and captions of 3 to 90 words, without an end."""
    rng, words = np.random.Generator(np.random.Philox(1)), random.Random(1)
    made = []
    for width, height in SIZES:
        coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        file = io.BytesIO()
        coarse.save(file, "JPEG", quality=60)
        made.append(file.getvalue())
    while True:
        yield words.choice(made), ", ".join(words.choices(WORDS, k=words.choice((3, 8, 20, 90))))


def write(folder: Path, records: int) -> None:
    """Write tars as img2dataset does."""
    source = pictures()
    for shard in range(TARS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard, records, TARS):
                picture, caption = next(source)
                for name, data in ((f"{number:09d}.jpg", picture), (f"{number:09d}.txt", caption.encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def config(folder: Path, cache: Path) -> TrainConfig:
    """Return SDXL's usual buckets with every choice that is drawn; the tiny vocabulary counts the tokens."""
    return TrainConfig.model_validate(
        {
            "model": {"init_from_config": "tiny"},
            "data": {
                "dirs": [str(folder)],
                "resolution": (512, 512),
                "enable_bucket": True,
                "max_bucket_reso": 1024,
                "random_crop": True,
                "flip": True,
                "cache_dir": str(cache),
            },
            "captions": {"shuffle": True, "tag_dropout_rate": 0.1},
            "training": {"seed": 1, "batch_size": 16},
        }
    )


def cpu_s() -> float:
    """Return the processor time of this process and of those that it has ended."""
    return sum(os.times()[:4])


def check(name: str, value: float, limit: float, unit: str) -> bool:
    """Print one figure beside its limit; return whether it keeps it."""
    print(f"{'PASS' if value <= limit else 'FAIL'}  {name:<44} {value:14,.1f} {unit:<5} limit {limit:,g}", flush=True)
    return value <= limit


def main() -> int:
    """Write the data, look at it twice, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        folder = root / "data"
        folder.mkdir()
        write(folder, args.records)
        started = time.perf_counter()
        read = sum(len(path.read_bytes()) for path in sorted(folder.iterdir()))
        reading = time.perf_counter() - started
        print(f"      {args.records:,} pictures in {TARS} tars, {read / 2**20:.0f} MiB")
        for name in ("from nothing", "again, the index is there"):
            started, busy = time.perf_counter(), cpu_s()
            page = inspect(config(folder, root / "cache"), root / "page.html", log=lambda line: None)
            seconds = time.perf_counter() - started
            good &= check(f"inspect {args.records:,}, {name}", seconds, LIMIT_S, "s")
            print(f"      processor time of that: {cpu_s() - busy:.1f} s, of all its processes")
        good &= check("the page", page.stat().st_size, LIMIT_BYTES, "bytes")
        many = inspect(config(folder, root / "cache"), root / "many.html", pictures=1000, log=lambda line: None)
        good &= check("the page with 1,000 pictures", many.stat().st_size, LIMIT_BYTES, "bytes")
        print(
            f"ratio: the last inspection takes {seconds / reading:.1f} times as long as reading the bytes of the tars"
        )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
