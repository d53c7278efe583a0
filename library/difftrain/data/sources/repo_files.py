"""Which files of a repository are data to train on: those that a folder of the same content would be read from."""

from __future__ import annotations

from collections.abc import Sequence

from difftrain.data.sources.base import IMAGE_SUFFIXES, split_suffix
from difftrain.data.sources.configured import CAPTION_SUFFIXES, kind_of_suffixes


def data_files(
    files: Sequence[str], path: str, captions: Sequence[str] = CAPTION_SUFFIXES, *, flat: bool = False
) -> tuple[list[str], str]:
    """Choose tars, or pictures with their captions, or parquet files below a folder ("": the top); or one file named.

    flat: only of the folder itself. Return them, and the path to hand on. The first level that holds any decides, as on
    disk. No files: no data.
    """
    if path in files:
        return [path], path
    prefix = f"{path}/" if path else ""
    inside = [file for file in files if file.startswith(prefix) and not _hidden(file[len(prefix) :])]
    if flat:
        inside = [file for file in inside if "/" not in file[len(prefix) :]]
    kind = next(filter(None, map(kind_of_suffixes, _levels(inside))), "")
    wanted = {"tar": {".tar"}, "parquet": {".parquet"}, "folder": {*IMAGE_SUFFIXES, *captions}}.get(kind, set())
    return [file for file in inside if _suffix(file) in wanted], path


def _levels(files: Sequence[str]) -> list[set[str]]:
    """Return the suffixes of each depth, the top first."""
    levels: dict[int, set[str]] = {}
    for file in files:
        levels.setdefault(file.count("/"), set()).add(_suffix(file))
    return [levels[depth] for depth in sorted(levels)]


def _suffix(file: str) -> str:
    return split_suffix(file.rpartition("/")[2])[1]


def _hidden(file: str) -> bool:
    return any(part.startswith(".") for part in file.split("/"))
