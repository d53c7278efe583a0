"""Speed of our host draws: normals against torch.randn, permutations against numpy's, in one process and alternating.

    python benchmarks/draws.py

Ratios are their time over ours: above 1 ours is faster. 2026-11, one thread of a shared x86 machine, torch 2.13:
normals 0.6-0.8 of torch.randn's speed at 112-216 M/s (its AVX normals are not the same on another machine; ours are),
the order of a million 1.0 of numpy's, 64 places of ten million 0.34 ms.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from difftrain.diffusion.draws import integer, normal
from difftrain.diffusion.permutation import Permutation

ROUNDS = 15


def alternate(ours: Callable[[int], object], theirs: Callable[[int], object]) -> tuple[float, float]:
    """Return the median seconds of each, taken in turn: a noisy machine disturbs both alike."""
    took: tuple[list[float], list[float]] = ([], [])
    for k in range(-2, ROUNDS):
        for action, times in zip((ours, theirs), took):
            start = time.perf_counter()
            action(k & 0xFFFF)
            if k >= 0:
                times.append(time.perf_counter() - start)
    return statistics.median(took[0]), statistics.median(took[1])


def report(name: str, ours: float, theirs: float, count: int) -> None:
    """Print one line: our time and rate, and theirs over ours."""
    print(f"{name:<42} {ours * 1e3:9.3f} ms {count / ours / 1e6:8.1f} M/s   ratio to theirs {theirs / ours:.2f}")


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    generator = torch.Generator()
    shapes = {"SDXL 1024 px noise": (4, 128, 128), "video latent": (16, 33, 64, 64), "4 million": (4_000_000,)}
    for name, shape in shapes.items():

        def ours(k: int, shape: tuple[int, ...] = shape) -> object:
            return torch.from_numpy(normal(1, b"key", k, "noise", shape))

        def theirs(k: int, shape: tuple[int, ...] = shape) -> object:
            return torch.randn(shape, generator=generator.manual_seed(k))

        report(f"normal, {name}, against torch.randn", *alternate(ours, theirs), int(np.prod(shape)))
    n = 1_000_000
    places = np.arange(n)
    times = alternate(lambda k: Permutation(n, k)(places), lambda k: np.random.default_rng(k).permutation(n))
    report("order of a million, against numpy", *times, n)
    some = np.arange(64)
    times = alternate(lambda k: Permutation(10**7, k)(some), lambda k: np.random.default_rng(k).permutation(n))
    report("64 of ten million, against shuffling one", *times, 64)
    start = time.perf_counter()
    for k in range(2000):
        integer(1, b"key", k, "timestep", 1000)
    print(f"one integer: {(time.perf_counter() - start) / 2000 * 1e6:.1f} us")


if __name__ == "__main__":
    main()
