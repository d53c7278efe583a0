"""Photographs for benchmarks: JPEG files of Debian's wallpaper packages, kept in the user's cache folder, and pieces of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("mate-backgrounds", "plasma-workspace-wallpapers")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difftrain" / "benchmark-data"


def photographs(width: int = 2560) -> list[Path]:
    """Return the JPEG files that are `width` pixels wide, as they were published, one of each; [] where none can be had."""
    from PIL import Image

    found = {}
    for package in PACKAGES:
        for path in sorted(_unpacked(package).rglob("*.jpg")):
            if path.is_symlink():
                continue
            with Image.open(path) as image:
                if image.width == width:
                    found.setdefault((image.size, path.stat().st_size), path)
    return list(found.values())


def write_pieces(folder: Path, count: int, side: int = 1024) -> int:
    """Cut photographs into square JPEGs of about a megapixel, each with a caption of its own; return how many.

    0 where no photograph can be had.
    """
    from PIL import Image

    sources, made = photographs(), 0
    folder.mkdir(parents=True)
    for path in sources:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        for top in range(0, image.height - side + 1, 192):
            for left in range(0, image.width - side + 1, 384):
                if made == count:
                    return made
                image.crop((left, top, left + side, top + side)).save(folder / f"{made:05d}.jpg", quality=92)
                (folder / f"{made:05d}.txt").write_text(f"photograph {path.stem}, from {left} and {top}")
                made += 1
    return made


def write_made_up(folder: Path, count: int, side: int = 1024) -> int:
    """Write JPEGs whose spectrum falls as that of photographs does (amplitude 1 / frequency); return how many."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    row = np.fft.fftfreq(side)
    frequency = np.hypot(row[:, None], row[None, : side // 2 + 1])
    frequency[0, 0] = np.inf
    for number in range(count):
        drawn = np.random.default_rng(number).standard_normal((2, 3, side, side // 2 + 1))
        planes = np.fft.irfft2((drawn[0] + 1j * drawn[1]) / frequency, s=(side, side))
        planes = 128 + 50 * planes / planes.std(axis=(1, 2), keepdims=True)
        image = Image.fromarray(planes.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
        image.save(folder / f"{number:05d}.jpg", quality=92)
        (folder / f"{number:05d}.txt").write_text(f"number {number}, made up")
    return count


def _unpacked(package: str) -> Path:
    target = CACHE / package
    if target.is_dir() or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        done = subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            print(f"{package} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return target
        archive = next(Path(folder).glob("*.deb"))
        (Path(folder) / "files").mkdir()
        subprocess.run(["dpkg-deb", "-x", str(archive), str(Path(folder) / "files")], check=True)
        (Path(folder) / "files").rename(target)
    return target
