"""What pages are put together from: charts as inline SVG, plain data as tables, and pictures as data addresses."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from difftrain.report.line import fixed

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 36
LETTER = 6.0  # width of a letter of a name
MOST_POINTS = 600  # a curve: two (lowest and highest) for every pixel pair, so that no spike is lost


@dataclass(frozen=True)
class Curve:
    """One line of a chart; points whose y is no number are left out.

    style: a class of the page's style sheet. hue: of a curve among many, in degrees; its style is "hue".
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    style: str = "c1"
    hue: int | None = None

    @property
    def attributes(self) -> str:
        """Return what follows the other attributes of its elements."""
        return "" if self.hue is None else f' style="--hue: {self.hue}"'

    def points(self) -> list[tuple[float, float]]:
        """Return the points that can be drawn."""
        return [(x, y) for x, y in zip(self.xs, self.ys) if y is not None and math.isfinite(y)]


def line_chart(curves: Sequence[Curve], *, x_label: str, marks: Sequence[float] = (), zero: bool = False) -> str:
    """Draw curves over one x axis. marks: places of vertical lines. zero: let the y axis begin there."""
    drawn = [(curve, curve.points()) for curve in curves]
    drawn = [(curve, points) for curve, points in drawn if points]
    if not drawn:
        return '<p class="none">nothing was recorded</p>'
    x_low, x_high = _widened([x for _, points in drawn for x, _ in points])
    ys = [y for _, points in drawn for _, y in points]
    y_ticks = ticks(*_widened([*ys, 0.0] if zero else ys))
    y_low, y_high = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return across, down

    parts = _axes(place, ticks(x_low, x_high, whole=True), y_ticks, (x_low, x_high), x_label)
    for mark in marks:
        if x_low < mark < x_high:
            at, _ = place(mark, y_low)
            parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for curve, points in drawn:
        placed = [place(*point) for point in thinned(points, MOST_POINTS)]
        if len(placed) == 1:
            parts.append(
                f'<circle class="dot {curve.style}" cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" r="3"{curve.attributes}/>'
            )
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="curve {curve.style}" points="{path}"{curve.attributes}/>')
    legend = _legend([curve for curve, _ in drawn]) if len(drawn) > 1 else ""
    return legend + _svg(parts, f"{', '.join(curve.name for curve, _ in drawn)} over {x_label}")


def bar_chart(names: Sequence[str], values: Sequence[float], *, x_label: str) -> str:
    """Draw one bar a name, from zero up."""
    if not values or not all(math.isfinite(value) for value in values):
        return '<p class="none">nothing was recorded</p>'
    y_ticks = ticks(*_widened([0.0, *values]))
    top = max(y_ticks[-1], max(values))
    slot = (WIDTH - LEFT - RIGHT) / len(values)
    every = math.ceil(LETTER * (max(map(len, names)) + 1) / slot)  # names that would overlap are left out

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x, HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = _axes(place, [], [tick for tick in y_ticks if tick >= 0], (0.0, WIDTH - LEFT - RIGHT), x_label)
    for number, (name, value) in enumerate(zip(names, values)):
        left, down = place((number + 0.15) * slot, max(value, 0.0))
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{down:.1f}" width="{0.7 * slot:.1f}" '
            f'height="{HEIGHT - BOTTOM - down:.1f}"><title>{escape(name)}: {fixed(value, 4)}</title></rect>'
        )
        if number % every == 0:
            parts.append(
                f'<text class="tick" x="{left + 0.35 * slot:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">'
                f"{escape(name)}</text>"
            )
    return _svg(parts, f"{x_label}: {', '.join(f'{n} {fixed(v, 3)}' for n, v in zip(names, values))}")


def ticks(low: float, high: float, *, whole: bool = False, about: int = 5) -> list[float]:
    """Return round values (1, 2 or 5 times a power of ten apart) that span low to high."""
    step = (high - low) / about
    power = 10.0 ** math.floor(math.log10(step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
    if whole:
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most so many points: of every stretch the lowest and the highest, in order."""
    if len(points) <= most:
        return points
    stretches = most // 2
    kept: list[tuple[float, float]] = []
    for number in range(stretches):
        part = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _widened(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _axes(
    place: Callable[[float, float], tuple[float, float]],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_range: tuple[float, float],
    x_label: str,
) -> list[str]:
    parts = []
    for tick in y_ticks:
        _, down = place(x_range[0], tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{label(tick)}</text>')
    for tick in x_ticks:
        if x_range[0] <= tick <= x_range[1]:
            across, _ = place(tick, y_ticks[0])
            parts.append(
                f'<text class="tick" x="{across:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{label(tick)}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def label(value: float) -> str:
    """Write a tick: short, in fixed-point."""
    text = fixed(value, 3)
    return text.removesuffix(".0")


def _legend(curves: Sequence[Curve]) -> str:
    spans = "".join(f'<span class="{c.style}"{c.attributes}>{escape(c.name)}</span>' for c in curves)
    return f'<p class="legend">{spans}</p>'


def _svg(parts: list[str], description: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )


MOST_ROWS = 200
LONG = 30  # items of a list longer than this stand on lines of their own


def cell(value: Any) -> str:
    """Write one value."""
    if value is None:
        return '<span class="none">not measured</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1e6):
        return f"{value:,.0f}".replace(",", "\u202f")  # narrow space: no reader takes it for a decimal point
    if isinstance(value, float):
        return fixed(value, 5)
    if isinstance(value, Mapping):
        return pairs(value) if value else "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        if value and all(isinstance(item, Mapping) for item in value):
            return rows(value)
        between = "<br>" if any(len(str(item)) > LONG for item in value) else ", "
        return between.join(escape(str(item)) for item in value) or "none"
    return escape(str(value)) or "none"


def name(key: str) -> str:
    """Write a key as words."""
    return escape(str(key).replace("_", " "))


def pairs(values: Mapping[str, Any]) -> str:
    """Write a mapping as a table of two columns."""
    return (
        '<table class="pairs">'
        + "".join(f"<tr><th>{name(k)}</th><td>{cell(v)}</td></tr>" for k, v in values.items())
        + "</table>"
    )


def rows(records: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> str:
    """Write records as a table. columns: key -> heading; without, every key that occurs, in order."""
    if not records:
        return '<p class="none">none</p>'
    heads = columns or {key: str(key).replace("_", " ") for record in records for key in record}
    head = "".join(
        f'<th class="number">{escape(text)}</th>' if _is_number(records[0].get(key)) else f"<th>{escape(text)}</th>"
        for key, text in heads.items()
    )
    body = "".join(
        "<tr>" + "".join(_data(record.get(key, "")) for key in heads) + "</tr>" for record in records[:MOST_ROWS]
    )
    more = len(records) - MOST_ROWS
    rest = f'<p class="none">and {more} more</p>' if more > 0 else ""
    return (
        f'<div class="wide"><table class="rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{rest}'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _data(value: Any) -> str:
    return (
        f'<td class="number">{cell(value)}</td>'
        if _is_number(value)
        else f"<td>{'' if value == '' else cell(value)}</td>"
    )


FOLDER = "sample"  # kohya's name for it, in the output folder
LONGEST_SIDE = 1400
ENOUGH_BYTES = 400_000


def sample_pictures(run_dir: Path, most: int = 4) -> list[Path]:
    """Return the newest sample pictures, oldest first, with the very first one among them to see the progress.

    Where a step has a grid of all prompts, only grids are taken.
    """
    found = sorted((run_dir / FOLDER).glob("*.png"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    grids = [path for path in found if path.stem.endswith("_grid")]
    found = grids or found
    return found if len(found) <= most else [found[0], *found[1 - most :]]


def data_address(path: Path) -> str:
    """Return a picture as a data address: the PNG itself where it is small, else a JPEG of bounded size."""
    raw = path.read_bytes()
    with Image.open(io.BytesIO(raw)) as picture:
        if len(raw) <= ENOUGH_BYTES and max(picture.size) <= LONGEST_SIDE:
            return "data:image/png;base64," + base64.b64encode(raw).decode()
        small = picture.convert("RGB")
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    for quality in (88, 75, 60):
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=quality, optimize=True)
        if buffer.tell() <= ENOUGH_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
