"""Small picture folders with captions, the same at every call: for tests and benchmarks of what reads pictures."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, size_wh: tuple[int, int]) -> bytes:
    """Return a PNG of noise: no two numbers look the same."""
    pixels = np.random.Generator(np.random.Philox(key=number)).integers(0, 256, (size_wh[1], size_wh[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def write_folder(folder: Path, sizes: Iterable[tuple[int, int]], start: int = 0) -> Path:
    """Write pictures with captions ("picture 7, second, third") as files; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes, start):
        (folder / f"{number:04d}.png").write_bytes(picture(number, size))
        (folder / f"{number:04d}.txt").write_text(f"picture {number}, second, third")
    return folder


def write_tar(path: Path, sizes: Iterable[tuple[int, int]], start: int = 0) -> Path:
    """Write pictures with captions as a tar; return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, size in enumerate(sizes, start):
            for name, data in (
                (f"{number:05d}.png", picture(number, size)),
                (f"{number:05d}.txt", f"picture {number}, second, third".encode()),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path
