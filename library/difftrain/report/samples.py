"""Sample images of a run on its page: a row a prompt, a column a step, with the prompt below and how it was drawn.

Of a clip the small animated .webp beside its .png is shown, where the page has room for it, else the .png. What was drawn is read off the names that training gives (NAME_WHEN_NUMBER_TIME_SEED.png, as kohya's trainers do) and off
the PNG files themselves, which hold prompt and settings. Either may be missing or hostile.
"""

from __future__ import annotations

import functools
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from difftrain.io.files import read_regular
from difftrain.report.page import data_address, escape, isolated, jpeg_address, note, panel

FOLDER = "sample"  # kohya's name for it, in the output folder
CLIP = ".webp"  # of a clip: it moves
CHUNK = "difftrain"  # of a PNG: how it was drawn, as sampling/png.py writes it
MOST_STEPS, MOST_CELLS, MOST_EXTRAS = 8, 64, 4
# of all cells together 4 MB as the page holds them, so that a page stays below 6 MB; few may be larger each
FEW, FEW_BYTES, CELL_BYTES = 16, 180_000, 45_000
# longest side and quality, until the bytes are enough
FEW_TRIES = ((1024, 86), (768, 84), (640, 80), (512, 75), (384, 65), (256, 60))
CELL_TRIES = ((448, 82), (384, 78), (320, 72), (224, 65), (160, 55))
CLIP_TRIES = ((192, 24), (160, 16), (128, 12), (96, 8))  # longest side and frames
TINY = 128  # px: an image up to here is shown with its pixels, not blurred
MOST_BYTES = 1 << 26  # of a file that is looked at
LONGEST = 600  # characters of a prompt
_SINGLE = re.compile(r"(?P<name>.*)_(?P<when>[^_]+)_(?P<number>\d{2,})_(?P<time>\d{14})_\d+\.png")
_GRID = re.compile(r".*_e?\d{6,}_grid\.png")
_WHEN = re.compile(r"(e?)(\d{6,})")


@dataclass(frozen=True)
class SampleImages:
    """What there is to show. steps: names of the columns in order. cells: by (prompt's number, column).

    extras: grids of what has no single images, and scored images; total_steps: columns before some were left out.
    """

    steps: list[str] = field(default_factory=list)
    cells: dict[tuple[int, str], Path] = field(default_factory=dict)
    extras: list[Path] = field(default_factory=list)
    total_steps: int = 0

    @property
    def prompts(self) -> list[int]:
        """Return the prompts' numbers in order."""
        return sorted({number for number, _ in self.cells})


def sample_images(run_dir: Path) -> SampleImages:
    """Choose images of a run's folder: of many steps the first, the last and some between; of two runs the later."""
    paths = sorted((run_dir / FOLDER).glob("*.png"), key=lambda path: path.name)
    singles = [(match, path) for path in paths if (match := _SINGLE.fullmatch(path.name))]
    drawn = [(match, path) for match, path in singles if _WHEN.fullmatch(match["when"])]
    known = {path for _, path in singles} | ({path for path in paths if _GRID.fullmatch(path.name)} if drawn else set())
    extras = sorted((path for path in paths if path not in known), key=_age)
    if not drawn:
        return SampleImages(extras=extras[-MOST_EXTRAS:])

    # --- of runs with different names in one folder the one that drew last; of images drawn twice the later
    name = max(drawn, key=lambda one: one[0]["time"])[0]["name"]
    cells: dict[tuple[int, str], Path] = {}
    times: dict[str, str] = {}
    for match, path in sorted(drawn, key=lambda one: one[0]["time"]):
        if match["name"] == name:
            cells[int(match["number"]), match["when"]] = path
            times.setdefault(match["when"], match["time"])
    columns = sorted(times, key=lambda when: (times[when], when))

    # --- as many as a page has room for
    prompts = sorted({number for number, _ in cells})[: MOST_CELLS // 2]
    most = max(2, min(MOST_STEPS, MOST_CELLS // len(prompts)))
    chosen = columns
    if len(columns) > most:
        chosen = [columns[round(i * (len(columns) - 1) / (most - 1))] for i in range(most)]
    kept = {key: path for key, path in cells.items() if key[0] in prompts and key[1] in chosen}
    return SampleImages(chosen, kept, extras[-MOST_EXTRAS:], len(columns))


def _age(path: Path) -> tuple[int, str]:
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:  # gone since it was listed
        return 0, path.name


def samples_section(images: SampleImages) -> str:
    """Return the matrix and what else was drawn; nothing where there is nothing."""
    most = FEW_BYTES if len(images.cells) <= FEW else CELL_BYTES
    rows = [_row(images, number, most) for number in images.prompts]
    extras = [
        panel(_figure(address, _words(path.stem), _words(path.stem), is_tiny), kind="strip few")
        for path in images.extras
        if (read := _read(path, FEW_BYTES)) is not None
        for address, is_tiny, _ in [read]
    ]
    body = "".join(f'<div class="panel">{row}</div>' for row in rows if row) + "".join(extras)
    left_out = images.total_steps - len(images.steps)
    footer = note(f"{left_out} steps in between are not shown; all images are in {FOLDER}/.") if left_out else ""
    return f'<div class="samples">{body}</div>{footer}' if body else ""


def _row(images: SampleImages, number: int, most: int) -> str:
    """Show one prompt over the steps, the prompt below."""
    figures: list[str] = []
    drawn: dict[str, Any] = {}
    for when in images.steps:
        path = images.cells.get((number, when))
        read = _read(path, most) if path is not None else None
        if path is None or read is None:
            continue
        address, is_tiny, drawn = read
        address = _moving(path, most) or address
        step = when_text(when)
        text = "\n".join([f"{step} · prompt {number + 1}", str(drawn.get("prompt", ""))[:LONGEST], _settings(drawn)])
        figures.append(_figure(address, step, text.strip(), is_tiny))
    if not figures:
        return ""
    prompt = drawn.get("prompt")
    named = isolated(str(prompt)[:LONGEST]) if prompt else escape(f"prompt {number + 1}")
    settings = f"<br><span>{isolated(text)}</span>" if (text := _settings(drawn)) else ""
    kind = "strip few" if len(figures) < 4 else "strip"
    return f'<div class="{kind}">{"".join(figures)}</div><p class="prompt">{named}{settings}</p>'


def _figure(address: str, caption: str, text: str, is_tiny: bool) -> str:
    kind = "zoom tiny" if is_tiny else "zoom"
    image = f'<img class="{kind}" src="{address}" alt="{escape(caption)}" data-note="{escape(text)}" decoding="async">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _settings(drawn: dict[str, Any]) -> str:
    """Write how an image was drawn in one line."""
    negative = drawn.get("negative_prompt")
    parts = [f"not: {str(negative)[:LONGEST]}"] if negative else []
    names = {"frames": "{} frames", "fps": "{} a second", "steps": "{} steps", "sampler": "{}", "cfg": "CFG {}"}
    names["seed"] = "seed {}"
    parts += [text.format(str(drawn[key])[:40]) for key, text in names.items() if drawn.get(key) is not None]
    return " · ".join(parts)


def when_text(when: str) -> str:
    """Write what a file's name says of the time: 000400 or e000003."""
    match = _WHEN.fullmatch(when)
    if match is None:
        return when
    number = int(match[2])
    return f"epoch {number}" if match[1] else "before training" if number == 0 else f"step {number:,}"


def _words(stem: str) -> str:
    return stem.replace("_", " ")


def _moving(path: Path, most: int) -> str | None:
    """Return the address of the animated picture beside a PNG; None where there is none, or nothing to be made of it."""
    try:
        clip = path.with_suffix(CLIP)
        stat = clip.stat()
        return _animated(clip, stat.st_mtime_ns, stat.st_size, most)
    except Exception:  # as in _read
        return None


@functools.lru_cache(maxsize=2 * MOST_CELLS)
def _animated(path: Path, changed: int, size: int, most: int) -> str | None:
    raw = read_regular(path, MOST_BYTES)
    with Image.open(io.BytesIO(raw), formats=("WEBP",)) as image:
        count = getattr(image, "n_frames", 1)
        if count < 2 or len(raw) <= most:
            return data_address(raw, "webp") if count > 1 else None
        for side, frames in CLIP_TRIES:  # smaller, and fewer frames, each shown longer
            step = -(-count // frames)
            shown = []
            for index in range(0, count, step):
                image.seek(index)
                shown.append(image.convert("RGB"))
                shown[-1].thumbnail((side, side), Image.Resampling.BICUBIC)
            file = io.BytesIO()
            duration = step * int(image.info.get("duration") or 100)
            shown[0].save(file, "WEBP", save_all=True, append_images=shown[1:], duration=duration, loop=0, quality=60)
            if file.tell() <= most:
                return data_address(file.getvalue(), "webp")
    return None


def _read(path: Path, most: int) -> tuple[str, bool, dict[str, Any]] | None:
    """Return (address, whether it is tiny, how it was drawn); None for what is no image, half written or gone."""
    try:
        stat = path.stat()
        return _encoded(path, stat.st_mtime_ns, stat.st_size, most)
    except Exception:  # decoders of foreign bytes raise anything: struct.error, zlib.error, KeyError, MemoryError, ...
        return None


@functools.lru_cache(maxsize=2 * MOST_CELLS)  # a page is written again and again while a run goes on
def _encoded(path: Path, changed: int, size: int, most: int) -> tuple[str, bool, dict[str, Any]]:
    raw = read_regular(path, MOST_BYTES)
    with Image.open(io.BytesIO(raw), formats=("PNG",)) as image:  # whatever else it is called: no other reader is asked
        drawn = _drawn(image.info.get(CHUNK))
        is_tiny = max(image.size) <= TINY
        tries = FEW_TRIES if most >= FEW_BYTES else CELL_TRIES
        if len(raw) <= most and max(image.size) <= tries[0][0]:
            image.load()
            return data_address(raw, "png"), is_tiny, drawn
        return jpeg_address(image.convert("RGB"), tries, most), is_tiny, drawn


def _drawn(text: Any) -> dict[str, Any]:
    """Read what a PNG says of itself: of a grid, of the first image."""
    try:
        content = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
