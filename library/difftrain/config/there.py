"""Looking whether what a user names is there: "no" also for a name too long, a folder that is closed, a user unknown.

pathlib raises for these, and a name that is wrong is to be said beside all other faults.
"""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str) -> str:
    """Return a path whose leading ~ is a user's own folder; as it is where there is no such user."""
    return os.path.expanduser(path)  # noqa: PTH111


def is_there(path: str | Path) -> bool:
    """Tell whether a file or folder can be seen."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: str | Path) -> bool:
    """Tell whether a file can be seen."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Tell whether a folder can be seen."""
    return os.path.isdir(path)  # noqa: PTH112


def is_url(place: str | None) -> bool:
    """Tell a place on an object store, s3://bucket/folder, from a folder of this machine."""
    return "://" in (place or "")
