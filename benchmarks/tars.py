"""Reading LAION-style tars: ours (index, plan, reads in place) against the webdataset package, taken in turns.

    pip install webdataset; python benchmarks/tars.py [--shards=8 --records=1000]

Each side reads every sample once: picture bytes and caption. Three cases: bytes alone; bytes, equally shuffled; decoded by
one and the same decoder, equally shuffled. Equally: webdataset's shuffle buffer holds as many samples as our window of
shards. Ratios are their time over ours, medians of rounds taken in turns, files in the page cache, one process and one
thread each. Building our index, once for all epochs, is reported apart. Limits: 1.2 on bytes, 1.0 decoded.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from difftrain.config import TrainConfig
from difftrain.data.index.index import Index
from difftrain.data.media.media import decode
from difftrain.data.plan.plan import EpochPlan
from difftrain.data.prepare import make_plan, open_data, prepare

ROUNDS = 7
BATCH = 32
WINDOW = 4
LIMITS = {"bytes": 1.2, "bytes, shuffled": 1.2, "decoded, shuffled": 1.0}


def write_tars(folder: Path, shards: int, records: int) -> int:
    """Write img2dataset's layout: NNNNN.tar of 256 px JPEG, .txt and .json members. Returns the bytes of all pictures."""
    rng = np.random.Generator(np.random.Philox(key=7))
    pictures = []
    for _ in range(64):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize((256, 256))
        file = io.BytesIO()
        coarse.save(file, "JPEG", quality=92)
        pictures.append(file.getvalue())
    total = 0
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for record in range(records):
                name, picture = f"{shard:05d}{record:04d}", pictures[(shard * records + record) % len(pictures)]
                total += len(picture)
                caption = f"picture {record} of shard {shard}, soft colours"
                parts = {"jpg": picture, "txt": caption.encode(), "json": json.dumps({"caption": caption}).encode()}
                for suffix, content in parts.items():
                    info = tarfile.TarInfo(f"{name}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return total


def ours(index: Index, plan: EpochPlan) -> Iterator[tuple[bytes, str]]:
    """Read an epoch in the plan's order, as a loader worker does."""
    for step in range(plan.steps(0)):
        for draw in (draw for uses in plan.parts(step) for draw in plan.draws(uses)):
            record = index.record(draw.record_id)
            yield index.read(record.media), record.captions[0]


def theirs(paths: list[str], buffer: int) -> Iterator[tuple[bytes, str]]:
    """Read an epoch through webdataset."""
    import webdataset

    dataset = webdataset.WebDataset(paths, shardshuffle=False, empty_check=False)
    if buffer:
        dataset = dataset.shuffle(buffer, initial=buffer, seed=1)
    for sample in dataset:
        yield sample["jpg"], sample["txt"].decode()


def timed(samples: Iterator[tuple[bytes, str]], work: Callable[[bytes], object] | None) -> tuple[float, int]:
    """Return the seconds of going through samples, and how many there were."""
    start, count = time.perf_counter(), 0
    for data, _ in samples:
        if work is not None:
            work(data)
        count += 1
    return time.perf_counter() - start, count


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--records", type=int, default=1000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tars"
        folder.mkdir()
        size = write_tars(folder, asked.shards, asked.records)
        count = asked.shards * asked.records
        print(f"{count} samples in {asked.shards} tars, {size / count / 1024:.0f} KiB a picture")
        data = {"dirs": (str(folder),), "resolution": (256, 256), "tar_order": "sequential", "tar_window": WINDOW}
        data |= {"cache_dir": str(Path(temporary) / "cache"), "tar_streams": 1, "verify": "quick"}
        cfg = TrainConfig.model_validate({"data": data, "training": {"seed": 1, "batch_size": BATCH}})
        start = time.perf_counter()
        prepared = open_data(cfg, prepare(cfg, log=lambda text: None))
        took = time.perf_counter() - start
        print(f"index and planning tables, once: {took:.2f} s, {count / took:,.0f} samples/s")
        plan = make_plan(prepared, cfg, BATCH)
        paths = sorted(str(path) for path in folder.glob("*.tar"))
        missed = False
        for name, limit in LIMITS.items():
            work = decode if "decoded" in name else None
            buffer = WINDOW * asked.records if "shuffled" in name else 0
            pairs = []
            for k in range(-1, ROUNDS):
                mine, seen = timed(ours(prepared.index, plan), work)
                other, theirs_seen = timed(theirs(paths, buffer), work)
                assert seen == plan.steps(0) * BATCH and theirs_seen == count, (seen, theirs_seen)
                if k >= 0:
                    pairs.append((other / theirs_seen / (mine / seen), seen / mine))
            ratio, rate = (statistics.median(values) for values in zip(*pairs))
            missed |= ratio < limit
            print(f"{name:<20} ours {rate:9,.0f} samples/s   ratio {ratio:5.2f}   limit {limit:g}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
