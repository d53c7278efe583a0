"""Make a demo's data and its model before training, each whole or absent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from difftrain.contracts import DataFault
from difftrain.demo import clips, datasets, pairs, recipe, splits
from difftrain.demo.make import (
    DEFAULT_FAMILY,
    FRAME_BUCKETS,
    MODEL,
    RANDOM,
    SETS,
    SHOWN,
    TRAIN,
    UNSEEN,
    data_text,
    references_of,
)
from difftrain.io.files import atomic_folder, write_text
from difftrain.models.registry import FAMILIES

Log = Callable[[str], None]
PROMPTS = {
    "shapes": ("a large red star", "a small blue circle", "a large green square", "a small purple triangle"),
    "emoji": ("red heart, love", "grinning face, happy, smile", "flag: Japan", "pizza, food, cheese"),
}


def prepare(dataset: str, scale: float, *, data_only: bool = False, log: Log = print) -> Path:
    """Make what is missing of a demo's folder and return the folder.

    Raises: DataFault where pictures cannot be fetched, or nothing can be written.
    """
    home = recipe.folder(dataset, scale)
    try:
        make_once(home / "data", lambda aside: _write_data(dataset, scale, aside, log))
        _write_prompts(home / "prompts.txt", dataset)
        if not data_only:
            make_once(recipe.model_folder(home), lambda aside: _write_model(dataset, scale, home / "data", aside, log))
    except OSError as error:
        raise DataFault(
            f"the demo's folder cannot be written: {error} (set XDG_CACHE_HOME to a folder with free space)"
        ) from error
    return home


def make_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside its place and rename it; another process may have been faster, and its folder stays."""
    if folder.is_dir():
        return
    with atomic_folder(folder) as aside:
        write(aside)


def _write_data(dataset: str, scale: float, folder: Path, log: Log) -> None:
    started = time.monotonic()
    if dataset == "shapes":
        count = max(256, round(recipe.SIZES[dataset].pictures * scale))
        written = datasets.write(folder, datasets.shape_pictures(count, recipe.SIDE, recipe.SEED))
    else:
        log("fetching emoji through npm")
        written = datasets.write(folder, datasets.emoji_pictures(recipe.cache_root() / "npm"))
    log(f"{written} captioned images in tars, {time.monotonic() - started:.0f} s: {folder.parent / 'data'}")


def _write_prompts(path: Path, dataset: str) -> None:
    lines = [
        f"{prompt} --w {recipe.SIDE} --h {recipe.SIDE} --s 25 --l 2 --d {number}"
        for number, prompt in enumerate(PROMPTS[dataset])
    ]
    write_text(path, "\n".join(lines) + "\n")


def _write_model(dataset: str, scale: float, data: Path, folder: Path, log: Log) -> None:
    from difftrain.demo.model import write_model

    write_model(dataset, scale, data, folder, log)


ALL = (MODEL, "data")
LEAST = 256


class DemoPrompts(NamedTuple):
    """What samples are drawn of. of: the prompts, by the folder of pictures. guidance, frames: of all."""

    of: Callable[[Path], Sequence[str]]
    guidance: float = 3
    frames: int = 1


FLOW_PROMPTS = {
    "shapes": DemoPrompts(lambda _: PROMPTS["shapes"]),
    "emoji": DemoPrompts(
        lambda _: ("red apple", "woman firefighter: dark skin tone", "green heart", "grinning face with smiling eyes")
    ),
    "pairs": DemoPrompts(lambda pictures: pairs.prompts(pictures / SHOWN), guidance=1),  # captions are never dropped
    "clips": DemoPrompts(lambda pictures: clips.prompts(pictures / UNSEEN), guidance=1, frames=clips.FRAMES),
}


def make(
    kind: str, home: Path, scale: float, log: Log, parts: tuple[str, ...] = ALL, family: str = DEFAULT_FAMILY
) -> None:
    """Make what is missing of a folder: the data first, to which the model is fitted.

    Raises: DataFault where pictures cannot be fetched, or nothing can be written.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        if "data" in parts or kind not in RANDOM:
            _make_data(kind, family, home, scale, log)
        if MODEL in parts:
            make_once(home / MODEL, lambda aside: _make_model(kind, family, home, scale, aside, log))
    except OSError as error:
        raise DataFault(f"{home}: the demo's folder cannot be written: {error}") from error


def _make_data(kind: str, family: str, home: Path, scale: float, log: Log) -> None:
    pictures = home / "pictures"
    references = references_of(kind, family, pictures)
    make_once(pictures, lambda aside: _write_pictures(kind, pictures, scale, aside, log, paired=references is not None))
    for name in reversed(SETS[kind]):  # the file that tells that all is there comes last
        write_text(home / f"{name}.toml", data_text(pictures / name, references, FRAME_BUCKETS.get(kind, ())))
    if kind in FLOW_PROMPTS:
        prompts = FLOW_PROMPTS[kind]
        options = f"--w {recipe.SIDE} --h {recipe.SIDE} --s 25 --l {prompts.guidance:g}"
        options += f" --f {prompts.frames}" if prompts.frames > 1 else ""
        lines = [f"{prompt} {options} --d {number}" for number, prompt in enumerate(prompts.of(pictures))]
        write_text(home / "prompts.txt", "\n".join(lines) + "\n")


def _write_pictures(kind: str, folder: Path, scale: float, aside: Path, log: Log, *, paired: bool) -> None:
    started = time.monotonic()
    full = recipe.SIZES[kind].pictures if kind in recipe.SIZES else 0
    counts = splits.WRITERS[kind](aside, max(LEAST, round(full * scale)) if full else 0)
    counts |= splits.write_references(aside) if paired else {}
    text = ", ".join(f"{count} in {name}" for name, count in counts.items())
    log(
        f"captioned {'clips' if kind in FRAME_BUCKETS else 'images'}: {text}, {time.monotonic() - started:.0f} s: {folder}"
    )


def _make_model(kind: str, family: str, home: Path, scale: float, aside: Path, log: Log) -> None:
    from difftrain.demo import model

    if kind in RANDOM:
        model.write_tiny(aside, family)
        log(f"a random model, the smallest {FAMILIES[family].title}: {home / MODEL}")
    else:
        model.write_flow_model(kind, scale, home / "pictures" / TRAIN, aside, log, family)
