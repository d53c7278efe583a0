"""kohya's folders: `<repeats>_<class words>` below the data folder, each its own number of repeats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from difftrain.data.sources.base import is_picture
from difftrain.data.sources.folder import is_folder, walk


@dataclass(frozen=True)
class KohyaFolder:
    """One sub-folder: its name, how often an epoch uses it, and the caption of pictures that have none."""

    name: str
    repeats: int
    words: str


def parse_name(name: str) -> KohyaFolder | None:
    """Read `10_sks dog` as (10, "sks dog"); None where it is no such name. Fewer than one repeat is none.

    A bare number is none either, though kohya takes it for repeats: large folders are often divided into 000, 001, ...
    """
    number, line, words = name.partition("_")
    if not line or not (number.isascii() and number.isdigit()) or int(number) < 1:
        return None
    return KohyaFolder(name, int(number), words.strip())


def kohya_folders(root: Path) -> list[KohyaFolder]:
    """Return the sub-folders of kohya's layout that hold pictures directly, by name."""
    found = []
    for entry in os.scandir(root):
        parsed = parse_name(entry.name) if is_folder(entry) else None
        if parsed is not None and _holds_pictures(Path(entry.path)):
            found.append(parsed)
    return sorted(found, key=lambda folder: folder.name)


def outside(root: Path, folders: list[KohyaFolder]) -> Iterator[str]:
    """Iterate over pictures that lie in none of the folders: kohya passes them over, we name them."""
    inside = {folder.name for folder in folders}
    for entry in os.scandir(root):
        if is_folder(entry) and entry.name not in inside and not entry.name.startswith("."):
            for path, _ in walk(root, entry.name):
                if is_picture(path):
                    yield path


def _holds_pictures(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(is_picture(entry.name) and not entry.name.startswith(".") for entry in entries)
