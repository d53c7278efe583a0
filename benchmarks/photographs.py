"""Large real photographs for benchmarks: JPEG files of Debian's wallpaper packages, kept in the user's cache folder."""

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
