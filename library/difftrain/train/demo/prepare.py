"""Make a demo's data and its model before training: pictures as tars, a small SDXL from a seed with a VAE that draws.

Everything is made beside its place and renamed, so that it is whole or absent, and kept for the next run.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from difftrain.contracts import DataFault
from difftrain.train.demo import emoji, recipe, shapes, tars

Say = Callable[[str], None]
PROMPTS = {
    "shapes": ("a large red star", "a small blue circle", "a large green square", "a small purple triangle"),
    "emoji": ("red heart, love", "grinning face, happy, smile", "flag: Japan", "pizza, food, cheese"),
}


def prepare(dataset: str, scale: float, *, data_only: bool = False, say: Say = print) -> Path:
    """Make what is missing of a demo's folder and return the folder.

    Raises: DataFault where pictures cannot be fetched, or nothing can be written.
    """
    home = recipe.folder(dataset, scale)
    try:
        whole(home / "data", lambda aside: _write_data(dataset, scale, aside, say))
        _write_prompts(home / "prompts.txt", dataset)
        if not data_only:
            whole(recipe.model_folder(home), lambda aside: _write_model(dataset, scale, home / "data", aside, say))
    except OSError as error:
        raise DataFault(
            f"the demo's folder cannot be written: {error} (set XDG_CACHE_HOME to a folder with room)"
        ) from error
    return home


def whole(place: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside its place and rename it; another process may have been faster, and its folder stays."""
    if place.is_dir():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(f"{place.name}-{uuid.uuid4().hex}")
    try:
        write(aside)
        try:
            aside.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_data(dataset: str, scale: float, folder: Path, say: Say) -> None:
    started = time.monotonic()
    if dataset == "shapes":
        count = max(256, round(recipe.SIZES[dataset].pictures * scale))
        written = tars.write(folder, shapes.pictures(count, recipe.SIDE, recipe.SEED))
    else:
        say("fetching emoji through npm")
        written = tars.write(folder, emoji.pictures(recipe.cache_root() / "npm"))
    say(f"{written} captioned pictures in tars, {time.monotonic() - started:.0f} s: {folder.parent / 'data'}")


def _write_prompts(path: Path, dataset: str) -> None:
    lines = [
        f"{prompt} --w {recipe.SIDE} --h {recipe.SIDE} --s 25 --l 2 --d {number}"
        for number, prompt in enumerate(PROMPTS[dataset])
    ]
    aside = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    aside.replace(path)


def _write_model(dataset: str, scale: float, data: Path, folder: Path, say: Say) -> None:
    from difftrain.train.demo.model import write_model

    write_model(dataset, scale, data, folder, say)
