"""Paths and URLs that a user names: whether they exist, where they are looked for, which stores can be read.

pathlib raises for a name too long, a closed folder or an unknown user; here each is "no", because a wrong name is to be
reported beside all other faults.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import difftrain


class PendingFiles(NamedTuple):
    """What is made once a configuration is known to be sound, and before the work begins.

    what: in a sentence. files: those that it names, with their texts where somebody reads them before; folders have None.
    make: makes it all, and returns an exit code.
    """

    what: str
    files: Mapping[Path, str | None]
    make: Callable[[], int]


_expected: dict[str, str | None] = {}


@contextmanager
def expecting(coming: PendingFiles) -> Iterator[None]:
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


def path_exists(path: str | Path) -> bool:
    """Tell whether a file or folder can be seen."""
    return os.path.exists(path) or _is_expected(path)  # noqa: PTH110


def is_file(path: str | Path) -> bool:
    """Tell whether a file can be seen."""
    return os.path.isfile(path) or (_is_expected(path) and _expected[os.path.abspath(path)] is not None)  # noqa: PTH100, PTH113


def is_folder(path: str | Path) -> bool:
    """Tell whether a folder can be seen."""
    return os.path.isdir(path) or (_is_expected(path) and _expected[os.path.abspath(path)] is None)  # noqa: PTH100, PTH112


def is_url(path: str | None) -> bool:
    """Tell a place on an object store, s3://bucket/folder, from a folder of this machine."""
    return "://" in (path or "")


def resolve_path(path: str, folder: str | Path) -> tuple[str, str]:
    """Settle a path of a file in `folder`: from the working directory, else from that folder.

    Returns: the path as it is used, and what is wrong with it, or "". What is in neither stays as it is written.
    """
    here = expanded(path)
    if os.path.isabs(here) or is_url(path):  # noqa: PTH117
        return path, ""
    beside = os.path.join(folder, here)  # noqa: PTH118 - the path stays as it is written
    if not path_exists(beside) or os.path.abspath(here) == os.path.abspath(beside):  # noqa: PTH100
        return path, ""
    if path_exists(here) and (_is_expected(here) or not os.path.samefile(here, beside)):  # noqa: PTH121
        return path, f"{path!r} is both in {Path.cwd()} and in {Path(folder).resolve()}, and these are two"
    return (path, "") if path_exists(here) else (beside, "")


def user_cache() -> Path:
    """Return the user's cache folder of this program, as the system has it; it need not be there."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "difftrain"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difftrain"


# --- what comes with the package beside its code: in the folders of a checkout, or inside the package from a wheel


def checkout() -> Path | None:
    """Return the checkout that this package runs from, also by an editable install; None where a wheel is installed."""
    package = Path(difftrain.__file__).resolve().parent
    root = package.parents[1]
    return root if package.parent.name == "library" and (root / "third_patch").is_dir() else None


def recipes_dir() -> Path:
    """Return the folder of the recipes: FOLDER/NAME.toml."""
    root = checkout()
    return root / "configs" if root else Path(difftrain.__file__).resolve().parent / "recipes"


def toml_entry_point() -> str:
    """Return what a message calls the entry point that takes any family's TOML: the script, or the command of a wheel."""
    return "train.py" if checkout() else "difftrain train"


def recipes_named() -> str:
    """Return where a message says that recipes are found."""
    return "configs/" if checkout() else "those that difftrain recipes lists"


_SECRET = re.compile(r"(?<=://)[^/@]*:[^/@]*@")
# pip's name of what a file system of fsspec's own imports, where it is not the module's
_PIP = {"smbclient": "smbprotocol", "libarchive": "libarchive-c", "git": "GitPython"}


def shown_url(url: str) -> str:
    """Return a URL as it may be printed: without a user's password."""
    return _SECRET.sub("…@", url)


def unreadable_url(url: str) -> tuple[str, str] | None:
    """Say why a URL cannot be read here, and what would help: its protocol is unknown, or a package is missing."""
    if _SECRET.search(url):
        what = f"{shown_url(url)!r} holds a password, which would be saved with the configuration"
        return what, "give it as fsspec or the store's own package takes it: by the environment, or a file of theirs"
    from fsspec.registry import available_protocols, get_filesystem_class, known_implementations

    for part in url.split("::"):
        protocol = part.partition("://")[0].lower()
        try:
            get_filesystem_class(protocol)
        except ValueError:
            usual = [
                name for name in ("s3", "gs", "az", "hf", "http", "https", "file") if name in available_protocols()
            ]
            return (
                f"{shown_url(url)!r}: no protocol {protocol!r} is known",
                f"give one of {', '.join(usual)}, or a folder",
            )
        except ImportError as error:
            package = known_implementations[protocol]["class"].partition(".")[0]
            if package == "fsspec":  # it has the file system, but not what that needs
                package = getattr(error.__cause__, "name", None) or "what fsspec's documents name"
            package = _PIP.get(package, package)
            return f"{shown_url(url)!r} needs the package {package}, which is not installed", f"pip install {package}"
    return None
