"""From the configured folders to sources: what kind each is, how often it is used, and what is wrong with it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.contracts import ConfigFault, DataFault, Fault
from difftrain.data.sources.base import IMAGE_SUFFIXES, SourceInfo, printable, split_suffix
from difftrain.data.sources.kohya import KohyaFolder, kohya_folders, outside

if TYPE_CHECKING:
    from difftrain.config import CaptionSection, DataSection

CAPTION_SUFFIXES = (".caption", ".txt")  # tried in this order where none is configured
_SHARDS = {".tar": "tar", ".parquet": "parquet"}


@dataclass
class Configured:
    """The sources of a run, and what was noticed while they were found."""

    infos: list[SourceInfo] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kohya: list[tuple[Path, list[KohyaFolder]]] = field(default_factory=list)

    def outside(self) -> Iterator[str]:
        """Iterate over the pictures that lie in none of a kohya root's folders.

        Raises: DataFault where a folder cannot be listed.
        """
        for root, folders in self.kohya:
            try:
                for path in outside(root, folders):
                    yield printable(f"{root}/{path}")
            except OSError as error:
                raise DataFault(f"{error.filename or root}: cannot be listed ({error.strerror})") from None


def configured_sources(data: DataSection, captions: CaptionSection) -> Configured:
    """Find out what each configured folder holds.

    Raises: ConfigFault where repeats don't fit; DataFault that names every folder that is missing or empty.
    """
    if not data.dirs:
        raise ConfigFault([Fault("data.dirs", "no data is given", "name a folder of pictures, tars or parquet files")])
    if len(data.repeats) not in (1, len(data.dirs)):
        raise ConfigFault(
            [
                Fault(
                    "data.repeats",
                    f"{len(data.repeats)} numbers for {len(data.dirs)} folders",
                    "give one, or one for each",
                )
            ]
        )
    repeats = data.repeats * len(data.dirs) if len(data.repeats) == 1 else data.repeats
    made, faults = Configured(), []
    for number, (folder, times) in enumerate(zip(data.dirs, repeats, strict=True)):
        try:
            _add(made, number, Path(folder).expanduser().resolve(), times, data, captions)
        except DataFault as fault:
            faults.append(str(fault))
    if faults:
        raise DataFault("\n".join(faults))
    if len(made.infos) > 1 << 16:
        raise DataFault(f"{len(made.infos)} sources: an index holds at most 65,536")
    return made


def _add(made: Configured, number: int, place: Path, repeats: int, data: DataSection, captions: CaptionSection) -> None:
    suffixes = (_suffix(captions.extension),) if captions.extension else CAPTION_SUFFIXES

    def info(kind: str, **more: object) -> SourceInfo:
        base: dict[str, object] = {"ordinal": len(made.infos), "name": str(number), "kind": kind, "root": str(place)}
        base |= {"repeats": repeats, "multi_line": captions.enable_wildcard}
        return SourceInfo(**(base | more))  # type: ignore[arg-type]

    columns = {"image_column": data.image_column or "", "caption_column": data.caption_column or ""}
    if place.is_file() and place.suffix.lower() in _SHARDS:
        kind = _SHARDS[place.suffix.lower()]
        file, place = place.name, place.parent
        base["masks"] = str(_place(data.conditioning_dir)) if data.conditioning_dir else ""
        made.infos.append(info(kind, only=file, **(columns if kind == "parquet" else {})))
        return
    kind, depth = _kind(place)
    made.notes.append(f"{place}: {_SENTENCES[kind]}")
    folders = kohya_folders(place) if kind == "folder" and depth == 1 else []
    if folders:
        made.kohya.append((place, folders))
        listed = ", ".join(f"{folder.name} x {folder.repeats}" for folder in folders[:8])
        more = f" and {len(folders) - 8} more" if len(folders) > 8 else ""
        made.notes[-1] = f"{place}: kohya's <repeats>_<class> folders: {listed}{more}"
        for folder in folders:
            times = repeats * folder.repeats
            made.infos.append(
                info("folder", repeats=times, prefix=f"{folder.name}/", words=folder.words, suffixes=suffixes)
            )
    elif kind == "folder":
        made.infos.append(info(kind, suffixes=suffixes))
    else:
        made.infos.append(info(kind, **(columns if kind == "parquet" else {})))


_SENTENCES = {
    "folder": "pictures with caption files",
    "tar": "tars, read in place; whatever lies beside them is not read",
    "parquet": "parquet files",
}


def _kind(root: Path) -> tuple[str, int]:
    """Return the kind of a folder and the depth at which its data begins: the first level that holds any decides.

    Raises: DataFault where there is no folder, or none of our kinds in it.
    """
    if not root.exists():
        raise DataFault(f"{root}: there is no such folder (data.dirs, --train_data_dir); give one that holds pictures")
    if not root.is_dir():
        raise DataFault(f"{root}: neither a folder nor a .tar or .parquet file (data.dirs, --train_data_dir)")
    level, depth, seen = [root], 0, Counter[str]()
    visited: set[tuple[int, int]] = set()
    while level:
        suffixes, below = _look(level, visited)
        seen += suffixes
        for fits, kind in _ORDER:
            if any(fits(suffix) for suffix in suffixes):
                return kind, depth
        level, depth = below, depth + 1
    found = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in seen.most_common(5)) or "nothing"
    raise DataFault(
        f"{root}: no pictures here at any depth, loose ({', '.join(sorted(IMAGE_SUFFIXES))}) or in .tar or .parquet "
        f"files; found: {found}"
    )


# tars go first (LAION keeps parquet beside them), and pictures before parquet (which may be their metadata)
_ORDER: tuple[tuple[Callable[[str], bool], str], ...] = (
    (lambda suffix: suffix == ".tar", "tar"),
    (lambda suffix: suffix in IMAGE_SUFFIXES, "folder"),
    (lambda suffix: suffix == ".parquet", "parquet"),
)


def _look(level: list[Path], visited: set[tuple[int, int]]) -> tuple[Counter[str], list[Path]]:
    """Count the suffixes of a level's files and return its sub-folders."""
    suffixes, below = Counter[str](), []
    for folder in level:
        found = folder.stat()
        if (found.st_dev, found.st_ino) in visited:
            continue
        visited.add((found.st_dev, found.st_ino))
        try:
            entries = os.scandir(folder)
        except OSError as error:
            raise DataFault(f"{folder}: cannot be listed ({error.strerror})") from None
        with entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    below.append(Path(entry.path))
                else:
                    suffixes[split_suffix(entry.name)[1]] += 1
    return suffixes, below


def _suffix(extension: str) -> str:
    return extension.lower() if extension.startswith(".") else f".{extension.lower()}"
