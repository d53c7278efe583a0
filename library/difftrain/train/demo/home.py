"""A demo's folder for the TOML door: model, tars, and the data set files that name them; each whole or absent."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from difftrain.contracts import DataFault
from difftrain.models.registry import FAMILIES
from difftrain.train.demo import recipe, sets
from difftrain.train.demo.make import DEFAULT_FAMILY, MODEL, TRAIN, UNSEEN, data_text
from difftrain.train.demo.prepare import whole

Say = Callable[[str], None]
ALL = (MODEL, "data")
LEAST = 256
PROMPTS = {
    "shapes": ("a large red star", "a small blue circle", "a large green square", "a small purple triangle"),
    "emoji": ("red apple", "woman firefighter: dark skin tone", "green heart", "grinning face with smiling eyes"),
}


def make(
    kind: str, home: Path, scale: float, say: Say, parts: tuple[str, ...] = ALL, family: str = DEFAULT_FAMILY
) -> None:
    """Make what is missing of a folder: the data first, to which the model is fitted.

    Raises: DataFault where pictures cannot be fetched, or nothing can be written.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        if "data" in parts or kind != "tiny":
            _make_data(kind, home, scale, say)
        if MODEL in parts:
            whole(home / MODEL, lambda aside: _make_model(kind, family, home, scale, aside, say))
    except OSError as error:
        raise DataFault(f"{home}: the demo's folder cannot be written: {error}") from error


def _make_data(kind: str, home: Path, scale: float, say: Say) -> None:
    pictures = home / "pictures"
    whole(pictures, lambda aside: _write_pictures(kind, pictures, scale, aside, say))
    for name in (UNSEEN, TRAIN):  # the file that tells that all is there comes last
        if (pictures / name).is_dir():
            _replace(home / f"{name}.toml", data_text(pictures / name))
    if kind in PROMPTS:
        options = f"--w {recipe.SIDE} --h {recipe.SIDE} --s 25 --l 3"
        lines = [f"{prompt} {options} --d {number}" for number, prompt in enumerate(PROMPTS[kind])]
        _replace(home / "prompts.txt", "\n".join(lines) + "\n")


def _write_pictures(kind: str, place: Path, scale: float, aside: Path, say: Say) -> None:
    started = time.monotonic()
    full = recipe.SIZES[kind].pictures if kind in recipe.SIZES else 0
    counts = sets.WRITERS[kind](aside, max(LEAST, round(full * scale)) if full else 0)
    said = ", ".join(f"{count} in {name}" for name, count in counts.items())
    say(f"captioned pictures: {said}, {time.monotonic() - started:.0f} s: {place}")


def _make_model(kind: str, family: str, home: Path, scale: float, aside: Path, say: Say) -> None:
    from difftrain.train.demo import flow_model

    if kind == "tiny":
        flow_model.write_tiny(aside, family)
        say(f"a random model, the smallest {FAMILIES[family].title}: {home / MODEL}")
    else:
        flow_model.write_model(kind, scale, home / "pictures" / TRAIN, aside, say, family)


def _replace(path: Path, text: str) -> None:
    import uuid

    aside = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
