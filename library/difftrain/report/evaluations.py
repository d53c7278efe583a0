"""What evaluation.jsonl says: the lines taken apart by evaluation set, and the part of the page that shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from difftrain.report.html_parts import Curve, line_chart, rows
from difftrain.report.line import fixed

EMA = "ema_"
KID = "kid_efflite0"
ERROR = "_error"
QUANTILE = "_quantile_"
VAE_ALONE = KID + "_vae"
_OWN = frozenset({"step", "epoch", "samples_seen"})
_QUANTILE = re.compile(rf"(.+){QUANTILE}(\d\.\d+)")
_FIRST_HUE, _LAST_HUE = 25, 265  # of little noise, of much


@dataclass
class SetLines:
    """Hold one evaluation set's numbers by name, each over the steps at which it was measured."""

    name: str
    values: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)

    def curve(self, key: str, label: str, style: str = "c1", hue: int | None = None) -> Curve:
        """Return a number over the steps."""
        points = self.values.get(key, [])
        return Curve(label, [step for step, _ in points], [value for _, value in points], style, hue)

    def last(self, key: str) -> float | None:
        """Return a number's latest value."""
        points = self.values.get(key, [])
        return points[-1][1] if points else None

    def quantiles(self, key: str) -> list[str]:
        """Return the quantiles at which a number was measured."""
        found = (_QUANTILE.fullmatch(each) for each in self.values)
        return sorted(match[2] for match in found if match and match[1] == key)


def by_set(lines: Iterable[Mapping[str, Any]]) -> list[SetLines]:
    """Take lines apart: a tag is the name of a set, a slash, and the name of a number."""
    sets: dict[str, SetLines] = {}
    for line in lines:
        step = line.get("step", 0)
        for tag, value in line.items():
            name, _, key = tag.rpartition("/")
            if tag not in _OWN and name and (value is None or isinstance(value, int | float)):
                sets.setdefault(name, SetLines(name)).values.setdefault(key, []).append((step, value))
    return list(sets.values())


def summary(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each set how it began and where it is: the losses' means, and the distance of drawn pictures."""
    found = []
    for each in by_set(lines):
        row: dict[str, Any] = {"set": each.name, "records": each.last("samples")}
        for key, points in each.values.items():
            if not _QUANTILE.fullmatch(key) and key != "samples":
                first, last = points[0], points[-1]
                row[key] = {"first": first[1], "at_step": first[0], "last": last[1], "last_step": last[0]}
        found.append(row)
    return found


def section(lines: Sequence[Mapping[str, Any]], marks: Sequence[float] = ()) -> str:
    """Return panels for every set: the loss at each quantile, its mean, and the distance of pictures, over training."""
    return "".join(_of_set(each, marks) for each in by_set(lines))


def _of_set(each: SetLines, marks: Sequence[float]) -> str:
    title = f"{escape(each.name)}, {each.last('samples') or 0:g} records"
    parts = []
    means = [each.curve("loss", "weights as trained")]
    if "ema_loss" in each.values:
        means.append(each.curve("ema_loss", "averaged weights", "c2"))
    if "loss" in each.values:
        parts.append(_panel(line_chart(means, x_label="step", marks=marks), f"{title}: mean loss over nine quantiles"))
    parts += _at_quantiles(each, "loss", title, marks)
    measures = sorted(key for key in each.values if _is_measure(key))
    for key in measures:
        curves = [each.curve(key, key.replace("_", " "))]
        if EMA + key in each.values:
            curves.append(each.curve(EMA + key, "averaged weights", "c2"))
        parts.append(_panel(line_chart(curves, x_label="step", marks=marks), f"{title}: {key.replace('_', ' ')}"))
        if each.values[key] != each.values.get("loss"):  # where it is all of the loss it is up there already
            parts += _at_quantiles(each, key, title, marks)
    if KID in each.values:
        parts.append(_panel(_kid(each, marks), f"{title}: KID-efflite0 of drawn pictures"))
    return "".join(parts)


def _at_quantiles(each: SetLines, key: str, title: str, marks: Sequence[float]) -> Iterator[str]:
    """Yield panels with a curve for each quantile, of averaged weights and of those as trained."""
    for prefix, whose in ((EMA, "averaged weights"), ("", "weights as trained")):
        if names := each.quantiles(prefix + key):
            curves = [
                each.curve(f"{prefix}{key}{QUANTILE}{name}", name.rstrip("0"), "hue", _hue(place, len(names)))
                for place, name in enumerate(names)
            ]
            chart = line_chart(curves, x_label="step", marks=marks)
            yield _panel(chart, f"{title}: {key.replace('_', ' ')} at each quantile of the noise, {whose}")


def _is_measure(key: str) -> bool:
    told = key in ("loss", "samples") or key.startswith((KID, EMA))
    return not told and _QUANTILE.fullmatch(key) is None


def _hue(place: int, count: int) -> int:
    return round(_FIRST_HUE + place / max(count - 1, 1) * (_LAST_HUE - _FIRST_HUE))


def _kid(each: SetLines, marks: Sequence[float]) -> str:
    value, errors = each.curve(KID, "KID-efflite0"), dict(each.values.get(KID + ERROR, []))
    spread = [(step, mean, errors.get(step)) for step, mean in each.values[KID] if mean is not None]
    known = [(step, mean, error) for step, mean, error in spread if error is not None]
    around = [
        Curve(f"{sign} one standard error", [s for s, *_ in known], [m + by * e for _, m, e in known], "faint")
        for sign, by in (("+", 1), ("−", -1))
    ]
    if VAE_ALONE in each.values:
        around.append(each.curve(VAE_ALONE, "held-out pictures through the VAE alone", "c2"))
    table = rows([{"step": s, "KID": m, "standard error": "–" if e is None else fixed(e, 3)} for s, m, e in spread])
    return (
        line_chart([value, *around], x_label="step", marks=marks)
        + f"<details><summary>in numbers</summary>{table}</details>"
    )


def _panel(body: str, title: str) -> str:
    return f'<div class="panel"><h3>{title}</h3>{body}</div>'
