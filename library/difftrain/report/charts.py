"""Charts of pages, as inline SVG: curves over one axis, and bars.

A curve is in the page twice: as a picture that needs no script, and thinned as data, from which page.js draws it anew as
wide as it stands, with values under the pointer, zoom, logarithms, smoothing and other x axes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from difftrain.report.line import fixed

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 36
LETTER = 6.0  # width of a letter of a name
NAMED_END, END_LINE = 40, 11  # room for the names at the ends of lines, and how far apart they stand
MOST_POINTS = 600  # a drawn curve: two (lowest and highest) for every pixel pair, so that no spike is lost
MOST_VALUES = 1600  # of a curve as data, so that 100,000 steps of twenty curves stay below a megabyte


@dataclass(frozen=True)
class Curve:
    """One line of a chart; points whose y is no number are left out.

    style: a class of the page's style sheet. hue: of a curve among many, in degrees; its style is "hue". shade: of a
    curve in an ordered row, 0 to 1 along one ramp of colours; its style is "ramp".
    """

    name: str
    xs: Sequence[float] | np.ndarray
    ys: Sequence[float | None] | np.ndarray
    style: str = "c1"
    hue: int | None = None
    shade: float | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Return what the style sheet takes its colour from."""
        known = {"--hue": self.hue, "--shade": None if self.shade is None else round(self.shade, 3)}
        return {name: str(value) for name, value in known.items() if value is not None}

    @property
    def attributes(self) -> str:
        """Return what follows the other attributes of its elements."""
        style = ";".join(f"{name}: {value}" for name, value in self.variables.items())
        return f' style="{style}"' if style else ""

    def points(self) -> np.ndarray:
        """Return the points that can be drawn, shape (points, 2)."""
        both = np.array([self.xs, self.ys], dtype=np.float64).T.reshape(-1, 2)
        return both[np.isfinite(both).all(axis=1)]


def line_chart(
    curves: Sequence[Curve],
    *,
    x_label: str,
    marks: Sequence[float] = (),
    zero: bool = False,
    log: bool = False,
    ends: bool = False,
) -> str:
    """Draw curves over one x axis.

    marks: places of vertical lines. zero: let the y axis begin there. log: of powers of ten; what is not above 0 has no
    place on it. ends: write the curves' names where they end.
    """
    known = [(curve, points) for curve in curves if len(points := curve.points())]
    drawn = [(curve, _logarithms(points) if log else points) for curve, points in known]
    drawn = [(curve, points) for curve, points in drawn if len(points)]
    if not drawn:
        return '<p class="none">nothing was recorded</p>'

    # --- the ranges of both axes
    every = np.concatenate([points for _, points in drawn])
    x_low, x_high = _widened(every[:, 0].tolist())
    ys = [*every[:, 1].tolist(), *([0.0] if zero else [])]
    y_ticks = ticks(*_widened(ys), integers=log)
    y_low, y_high = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))
    right = RIGHT + (NAMED_END if ends else 0)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - right)
        down = HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return across, down

    # --- axes, marks and curves
    parts = _axes(to_pixels, ticks(x_low, x_high, integers=True), y_ticks, (x_low, x_high), x_label, log=log)
    for mark in marks:
        if x_low < mark < x_high:
            at, _ = to_pixels(mark, y_low)
            parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    last: list[tuple[float, str]] = []
    for curve, points in drawn:
        placed = [to_pixels(x, y) for x, y in thinned(points, MOST_POINTS).tolist()]
        last.append((placed[-1][1], curve.name))
        if len(placed) == 1:
            parts.append(
                f'<circle class="dot {curve.style}" cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" r="3"{curve.attributes}/>'
            )
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="curve {curve.style}" points="{path}"{curve.attributes}/>')
    if ends:
        parts += _end_names(last, WIDTH - right + 5)

    # --- names, the picture, and the same as data
    spans = "".join(f'<span class="{curve.style}"{curve.attributes}>{escape(curve.name)}</span>' for curve, _ in drawn)
    legend = f'<p class="legend">{spans}</p>' if len(drawn) > 1 else ""
    svg = _svg(parts, f"{', '.join(curve.name for curve, _ in drawn)} over {x_label}")
    data = {"x": x_label, "zero": zero, "log": log, "ends": ends, "marks": list(marks)}
    text = json.dumps(data | {"curves": [_as_data(*pair) for pair in known]}, separators=(",", ":"))
    return f'{legend}<div class="plot" data-plot="{escape(text, quote=True)}">{svg}</div>'


def _logarithms(points: np.ndarray) -> np.ndarray:
    points = points[points[:, 1] > 0]
    return np.column_stack([points[:, 0], np.log10(points[:, 1])])


def _end_names(ends: list[tuple[float, str]], across: float) -> list[str]:
    """Write names beside where their curves end, below one another where they would overlap."""
    lowest = -math.inf
    downs = []
    for down, name in sorted(ends):
        lowest = max(down, lowest + END_LINE)
        downs.append((lowest, name))
    over = max(0.0, lowest - (HEIGHT - BOTTOM))
    return [
        f'<text class="end" x="{across:.0f}" y="{down - over + 4:.1f}">{escape(name)}</text>' for down, name in downs
    ]


def _as_data(curve: Curve, points: np.ndarray) -> dict[str, Any]:
    """Return a curve as page.js reads it: its extremes, and where it is thinned the means that smoothing starts from."""
    kept = thinned(points, MOST_VALUES)
    data: dict[str, Any] = {
        "name": curve.name,
        "style": curve.style,
        "vars": curve.variables,
        "x": _numbers(kept[:, 0]),
        "y": _numbers(kept[:, 1]),
    }
    if len(kept) < len(points):
        starts = _stretches(len(points), MOST_VALUES)
        means = np.add.reduceat(points, starts, axis=0) / np.diff([*starts, len(points)])[:, None]
        data |= {"mx": _numbers(means[:, 0]), "my": _numbers(means[:, 1])}
    return data


def _numbers(values: np.ndarray) -> list[int | float]:
    """Round to what a screen can show: whole numbers as such, others to five digits."""
    rounded = [value if value % 1 == 0 else float(f"{value:.5g}") for value in values.tolist()]
    return [int(value) if value % 1 == 0 and abs(value) < 1e15 else value for value in rounded]


def bar_chart(names: Sequence[str], values: Sequence[float], *, x_label: str) -> str:
    """Draw one bar a name, from zero up."""
    if not values or not all(math.isfinite(value) for value in values):
        return '<p class="none">nothing was recorded</p>'
    y_ticks = ticks(*_widened([0.0, *values]))
    top = max(y_ticks[-1], max(values))
    slot = (WIDTH - LEFT - RIGHT) / len(values)
    every = math.ceil(LETTER * (max(map(len, names)) + 1) / slot)  # names that would overlap are left out

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        return LEFT + x, HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = _axes(to_pixels, [], [tick for tick in y_ticks if tick >= 0], (0.0, WIDTH - LEFT - RIGHT), x_label)
    for number, (name, value) in enumerate(zip(names, values)):
        left, down = to_pixels((number + 0.15) * slot, max(value, 0.0))
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


def rank_chart(names: Sequence[str], values: Sequence[float]) -> str:
    """Draw one lying bar a name, as long as its value beside the largest: for names that are words."""
    longest = max(values, default=0)
    if longest <= 0:
        return '<p class="none">none</p>'
    lines = "".join(
        f'<li><b><bdi>{escape(name)}</bdi></b><i style="width:{100 * value / longest:.1f}%"></i>'
        f"<span>{value:,.0f}</span></li>"
        for name, value in zip(names, values)
    )
    return f'<ol class="ranks">{lines}</ol>'


def ticks(low: float, high: float, *, integers: bool = False, about: int = 5) -> list[float]:
    """Return round values (1, 2 or 5 times a power of ten apart) that span low to high."""
    step = (high - low) / about
    power = 10.0 ** math.floor(math.log10(step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
    if integers:
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(points: np.ndarray, most: int) -> np.ndarray:
    """Return at most so many points, shape (points, 2): of every stretch the lowest and the highest, in order."""
    if len(points) <= most:
        return points
    starts = _stretches(len(points), most)
    kept = {0, len(points) - 1}  # so that a level curve, too, reaches the end
    for first, end in zip(starts, [*starts[1:], len(points)]):
        part = points[first:end, 1]
        kept |= {first + int(part.argmin()), first + int(part.argmax())}
    return points[sorted(kept)]


def _stretches(count: int, most: int) -> list[int]:
    """Return where the stretches begin of which two points each are kept, beside the first and the last of all."""
    stretches = most // 2 - 1
    return [number * count // stretches for number in range(stretches)]


def _widened(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _axes(
    to_pixels: Callable[[float, float], tuple[float, float]],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_range: tuple[float, float],
    x_label: str,
    *,
    log: bool = False,
) -> list[str]:
    def label(value: float) -> str:
        return fixed(value, 3).removesuffix(".0")

    parts = []
    for tick in y_ticks:
        _, down = to_pixels(x_range[0], tick)
        name = f"1e{tick:.0f}" if log else label(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{name}</text>')
    for tick in x_ticks:
        if x_range[0] <= tick <= x_range[1]:
            across, _ = to_pixels(tick, y_ticks[0])
            parts.append(
                f'<text class="tick" x="{across:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{label(tick)}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _svg(parts: list[str], description: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )
