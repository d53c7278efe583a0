"""Clips from video files against plain PyAV with one thread, taken in turns.

    python benchmarks/clips.py [--minutes=5]

A file of so many minutes is made first: H.264, 640 x 360, 24 frames a second, a key frame every ten seconds, B-frames, moving
noise. Ratios are plain PyAV's time over ours, the median over rounds. Windows: 17 frames at a random time, against decoding
from the start of the file up to their end, as one does who has no index; limit 3. Sequential: all frames of a minute, against
all frames of the file by `container.decode` and `to_ndarray`; limit 0.9. Index: probing small files, limit 60 s for 1,000.
Memory: what a process that decodes windows of the long file, cut to 256 x 256, takes beyond its start; limit 64 MiB.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path

import av
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from difftrain.data.media.clips import decode_clip, probe_clip
from difftrain.data.media.media import Decoded

FPS = 24
SIZE_WH = (640, 360)
WINDOW = 17
LIMITS = {"windows": 3.0, "sequential": 0.9, "index_s": 60.0, "memory_mib": 64.0}


def write(path: Path, frames: int, gop: int = 240) -> Path:
    """Encode moving noise."""
    width, height = SIZE_WH
    noise = np.random.default_rng(0).integers(0, 255, (height // 8 + 40, width // 8 + 80, 3), np.uint8)
    noise = noise.repeat(8, 0).repeat(8, 1)
    with av.open(path, "w") as output:
        stream = output.add_stream("libx264", rate=FPS, options={"g": str(gop), "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            top, left = number % 300, 2 * number % 600
            picture = np.ascontiguousarray(noise[top : top + height, left : left + width])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    return path


def plain(path: Path, first: int, frames: int) -> list[np.ndarray]:
    """Decode from the start, as the examples of PyAV do."""
    pictures = []
    with av.open(path) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for number, frame in enumerate(container.decode(video=0)):
            if number >= first:
                pictures.append(frame.to_ndarray(format="rgb24"))
            if len(pictures) == frames:
                break
    return pictures


def ours(path: Path, first: int, frames: int) -> np.ndarray:
    """Decode what the loader asks for."""
    return decode_clip(path, first=first, frames=frames, fps=Fraction(FPS))


def taken(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(path: Path, windows: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the median ratio, and the median seconds of ours."""
    rates, seconds = [], []
    for first, frames in windows:
        mine = taken(lambda: ours(path, first, frames))  # noqa: B023
        rates.append(taken(lambda: plain(path, first, frames)) / mine)  # noqa: B023
        seconds.append(mine)
    return statistics.median(rates), statistics.median(seconds)


def peak(path: Path, frames: int) -> float:
    """Return the MiB that windows add to the largest size of a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (path, frames))


def _peak(path: Path, frames: int) -> float:
    def cut(frame: Decoded) -> np.ndarray:
        return frame.pixels[:256, :256]

    before = _largest_mib()
    for first in (0, frames // 2, frames - WINDOW, frames // 3):
        decode_clip(path, first=first, frames=WINDOW, fps=Fraction(FPS), cut=cut)
    return _largest_mib() - before


def _largest_mib() -> float:
    """Return the peak of this process alone: getrusage hands the parent's down."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    frames = int(parser.parse_args().minutes * 60 * FPS)
    good = []
    with tempfile.TemporaryDirectory() as folder:
        long = write(Path(folder, "long.mp4"), frames)
        short = write(Path(folder, "short.mp4"), 60 * FPS)
        clip = write(Path(folder, "clip.mp4"), 5 * FPS)
        np.testing.assert_array_equal(ours(long, 1234, 5)[0], plain(long, 1234, 1)[0])

        rng = random.Random(0)
        windows = [(rng.randrange(frames - WINDOW), WINDOW) for _ in range(15)]
        rate, seconds = compare(long, windows)
        print(f"windows of {WINDOW} in {frames / FPS / 60:.0f} min: {rate:.1f} x plain PyAV's, {1e3 * seconds:.0f} ms")
        good.append(rate >= LIMITS["windows"])

        rate, seconds = compare(short, [(0, 60 * FPS)] * 5)
        print(f"sequential: {rate:.2f} x plain PyAV's, {60 * FPS / seconds:.0f} frames a second and core")
        good.append(rate >= LIMITS["sequential"])

        probes = taken(lambda: [probe_clip(clip) for _ in range(100)])
        print(f"index: {10 * probes:.1f} s for 1,000 clips of 5 s; the file of {frames / FPS / 60:.0f} min ", end="")
        print(f"{1e3 * taken(lambda: probe_clip(long)):.0f} ms")
        good.append(10 * probes <= LIMITS["index_s"])

        memory = peak(long, frames)
        print(f"memory: {memory:.0f} MiB beyond the start of a process")
        good.append(memory <= LIMITS["memory_mib"])
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
