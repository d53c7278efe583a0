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


def settled(path: str, folder: str | Path) -> tuple[str, str]:
    """Settle a path of a file in `folder`: from the working directory, else from that folder.

    Returns: the path as it is used, and what is wrong with it, or "". What is in neither stays as it is written.
    """
    here = expanded(path)
    if os.path.isabs(here) or is_url(path):  # noqa: PTH117
        return path, ""
    beside = os.path.join(folder, here)  # noqa: PTH118 - the path stays as it is written
    if not is_there(beside):
        return path, ""
    if is_there(here) and not os.path.samefile(here, beside):  # noqa: PTH121
        return path, f"{path!r} is both in {Path.cwd()} and in {Path(folder).resolve()}, and these are two"
    return (path, "") if is_there(here) else (beside, "")
