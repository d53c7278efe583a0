"""Looking whether what a user names is there: "no" also for a name too long, a folder that is closed, a user unknown.

pathlib raises for these, and a name that is wrong is to be said beside all other faults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Coming(NamedTuple):
    """What is made once a configuration is known to be sound, and before the work begins.

    what: in a sentence. files: those that it names, with their texts where somebody reads them before; folders have None.
    make: makes it all, and returns an exit code.
    """

    what: str
    files: Mapping[Path, str | None]
    make: Callable[[], int]


_expected: dict[str, str | None] = {}


@contextmanager
def expecting(coming: Coming) -> Iterator[None]:
    """Take what is to be made for there, inside."""
    _expected.update({os.path.abspath(path): text for path, text in coming.files.items()})  # noqa: PTH100
    try:
        yield
    finally:
        _expected.clear()


def _is_expected(path: str | Path) -> bool:
    return bool(_expected) and os.path.abspath(path) in _expected  # noqa: PTH100


def bytes_of(path: Path) -> bytes:
    """Return what a file holds, or will hold."""
    text = _expected.get(os.path.abspath(path)) if not os.path.exists(path) else None  # noqa: PTH100, PTH110
    return path.read_bytes() if text is None else text.encode()


def expanded(path: str) -> str:
    """Return a path whose leading ~ is a user's own folder; as it is where there is no such user."""
    return os.path.expanduser(path)  # noqa: PTH111


def is_there(path: str | Path) -> bool:
    """Tell whether a file or folder can be seen."""
    return os.path.exists(path) or _is_expected(path)  # noqa: PTH110


def is_file(path: str | Path) -> bool:
    """Tell whether a file can be seen."""
    return os.path.isfile(path) or (_is_expected(path) and _expected[os.path.abspath(path)] is not None)  # noqa: PTH100, PTH113


def is_folder(path: str | Path) -> bool:
    """Tell whether a folder can be seen."""
    return os.path.isdir(path) or (_is_expected(path) and _expected[os.path.abspath(path)] is None)  # noqa: PTH100, PTH112


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
    if not is_there(beside) or os.path.abspath(here) == os.path.abspath(beside):  # noqa: PTH100
        return path, ""
    if is_there(here) and (_is_expected(here) or not os.path.samefile(here, beside)):  # noqa: PTH121
        return path, f"{path!r} is both in {Path.cwd()} and in {Path(folder).resolve()}, and these are two"
    return (path, "") if is_there(here) else (beside, "")
