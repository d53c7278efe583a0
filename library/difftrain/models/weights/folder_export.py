"""Folders of weights that are whole or absent, and parts of them that need no second copy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from difftrain.io.files import aside_of


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Hand out a folder aside; put it in place on leaving, where an older one goes only when the new one is whole."""
    aside = aside_of(path)
    aside.mkdir(parents=True)
    try:
        yield aside
        _swap_in(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _swap_in(aside: Path, path: Path) -> None:
    if not path.exists():
        aside.rename(path)
        return
    old = aside.with_suffix(".old")
    path.rename(old)
    try:
        aside.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> bool:
    """Give a file a second name, or copy it where the file system has no such thing; tell which."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
        return True
    except OSError:
        shutil.copyfile(source, target)
        return False


def plain_files(paths: Sequence[Path], stem: str) -> list[tuple[Path, str]] | None:
    """Say under which names a part's files of weights lie where every reader finds them; None: they must be rewritten.

    One file of safetensors goes by its plain name, whatever variant it was; shards keep theirs, beside their index.
    """
    if len(paths) == 1 and paths[0].suffix == ".safetensors":
        return [(paths[0], f"{stem}.safetensors")]
    index = paths[0].with_name(f"{stem}.safetensors.index.json")
    if not index.is_file() or {path.name for path in paths} != set(_shards(index)):
        return None
    return [*((path, path.name) for path in paths), (index, index.name)]


def _shards(index: Path) -> Iterator[str]:
    yield from json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
