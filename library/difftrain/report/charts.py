"""Charts of pages, as inline SVG: curves over one axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

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
    spans = "".join(f'<span class="{curve.style}"{curve.attributes}>{escape(curve.name)}</span>' for curve, _ in drawn)
    legend = f'<p class="legend">{spans}</p>' if len(drawn) > 1 else ""
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
    def label(value: float) -> str:
        return fixed(value, 3).removesuffix(".0")

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


def _svg(parts: list[str], description: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )
