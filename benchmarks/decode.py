"""From a JPEG file's bytes to the pixels of its bucket: ours against full decode + Lanczos by Pillow, taken in turns.

    python benchmarks/decode.py [FOLDER]

Pictures: 2560 px wide photographs of Debian's wallpaper packages, or the JPEG files of FOLDER; none is enlarged. Ratios
are their time over ours, the median over rounds; MAD is the mean absolute difference to theirs, in 1/255. Two filters:
the default (area, which is not Lanczos: where theirs rings, ours does not) and --resize_interpolation=lanczos, for which
more of the picture is decoded. Limits, for the default filter and over the baseline files: the median ratio at least 2 to
the 1024 px bucket and 5 to the 256 px one, and the median MAD at most 1.
Of a progressive file every coefficient is read before the first pixel comes, which no smaller picture saves: printed
apart. Also PNG and WebP: full decode over Pillow's.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from photographs import photographs

from difftrain.config.schema.sections import DataSection
from difftrain.data.media.media import decode, decode_for, fit
from difftrain.data.plan.buckets import BucketTable, Fit

ROUNDS = 9
LIMITS = {1024: 2.0, 256: 5.0}
MAX_MAD = 1.0


def theirs(data: bytes, found: Fit) -> np.ndarray:
    """Decode whole, resize by Lanczos, cut the middle."""
    left, top = found.crop
    whole = Image.open(io.BytesIO(data)).convert("RGB").resize(found.resized_wh, Image.Resampling.LANCZOS)
    bucket = found.bucket
    return np.asarray(whole.crop((left, top, left + bucket.width, top + bucket.height))).transpose(2, 0, 1)


def ours(data: bytes, found: Fit, interpolation: str | None) -> np.ndarray:
    """Do what the loader does."""
    crop = (*found.crop, found.bucket.width, found.bucket.height)
    return fit(decode_for(data, found.resized_wh, interpolation).pixels, found.resized_wh, crop, False, interpolation)


def ratio(one: Callable[[], object], other: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median of the other's time over one's, taken in turns."""
    pairs = []
    for k in range(-1, rounds):
        start = time.perf_counter()
        one()
        middle = time.perf_counter()
        other()
        if k >= 0:
            pairs.append((time.perf_counter() - middle) / (middle - start))
    return statistics.median(pairs)


def jpegs(paths: list[Path], side: int) -> bool:
    """Print a line a picture, and judge the median of the baseline files."""
    table = BucketTable.of(
        DataSection(resolution=(side, side), enable_bucket=True, min_bucket_reso=64, max_bucket_reso=2 * side)
    )
    print(f"\nto the {side} px buckets{'':<32} lanczos: ratio   MAD    default filter: ratio   MAD")
    baseline: list[tuple[float, float]] = []
    for path in paths:
        data = path.read_bytes()
        with Image.open(path) as image:
            size, progressive = image.size, "progressive" in image.info
        found = table.select(size)
        if found.resized_wh[0] > size[0]:
            continue
        want = theirs(data, found).astype(int)
        cells = []
        for interpolation in ("lanczos", None):
            rate = ratio(lambda: ours(data, found, interpolation), lambda: theirs(data, found))  # noqa: B023
            mad = float(np.abs(ours(data, found, interpolation) - want).mean())
            cells.append((rate, mad))
        name = f"{path.parts[-4] if path.stem[0].isdigit() else path.stem} {size[0]}x{size[1]} -> {found.bucket}"
        kind = "progressive" if progressive else ""
        print(f"{name:<44} {kind:<12} {cells[0][0]:6.2f} {cells[0][1]:6.2f} {cells[1][0]:20.2f} {cells[1][1]:6.2f}")
        if not progressive:
            baseline.append(cells[1])
    if len(baseline) < 5:
        print(f"only {len(baseline)} baseline files: too few to judge by")
        return True
    rates, mads = zip(*baseline)
    middle, mad = statistics.median(rates), statistics.median(mads)
    print(
        f"{len(baseline)} baseline files, default filter: ratio median {middle:.2f} (limit {LIMITS[side]:g}), smallest "
        f"{min(rates):.2f}; MAD median {mad:.2f} (limit {MAX_MAD:g}), mean {statistics.mean(mads):.2f}, largest {max(mads):.2f}"
    )
    return middle >= LIMITS[side] and mad <= MAX_MAD


def others(path: Path) -> None:
    """Print how full decoding of one photograph as PNG and WebP compares."""
    with Image.open(path) as image:
        photo = image.convert("RGB").resize((1024, 640))
    for form, options in (("PNG", {}), ("WEBP", {"quality": 85})):
        file = io.BytesIO()
        photo.save(file, form, **options)
        data = file.getvalue()
        rate = ratio(lambda: decode(data), lambda: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))  # noqa: B023
        print(f"{form}, full decode: {rate:.2f} x Pillow's")


def main() -> int:
    """Measure and print."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    paths = sorted(folder.rglob("*.jp*g")) if folder else photographs()
    if not paths:
        print("no pictures: name a folder of JPEG files")
        return 2
    good = [jpegs(paths, side) for side in LIMITS]
    print()
    others(paths[0])
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
