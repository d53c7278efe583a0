"""What evaluation.jsonl says: the lines taken apart by evaluation set, and the part of the page that shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from difftrain.report.charts import Curve, line_chart
from difftrain.report.line import fixed
from difftrain.report.page import details, panel, rows

EMA = "ema_"
KID = "kid_efflite0"
KIDS = {
    KID: "KID-efflite0 of generated images",
    f"{KID}_middle_frame": "KID-efflite0 of the middle frames of generated clips",
}
ERROR = "_error"
QUANTILE = "_quantile_"
VAE_ALONE = "_vae"
_OWN = frozenset({"step", "epoch", "samples_seen"})
_QUANTILE = re.compile(rf"(.+){QUANTILE}(\d\.\d+)")


@dataclass
class SetLines:
    """Hold one evaluation set's numbers by name, each over the steps at which it was measured."""

    name: str
    values: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)

    def curve(self, key: str, label: str, style: str = "c1", shade: float | None = None) -> Curve:
        """Return a number over the steps. shade: along the ramp of colours, 0 to 1."""
        points = self.values.get(key, [])
        return Curve(label, [step for step, _ in points], [value for _, value in points], style, shade=shade)

    def last(self, key: str) -> float | None:
        """Return a number's latest value."""
        points = self.values.get(key, [])
        return points[-1][1] if points else None

    def quantiles(self, key: str) -> list[str]:
        """Return the quantiles at which a number was measured."""
        matches = map(_QUANTILE.fullmatch, self.values)
        return sorted(match[2] for match in matches if match and match[1] == key)


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
    summaries = []
    for numbers in by_set(lines):
        row: dict[str, Any] = {"set": numbers.name, "records": numbers.last("samples")}
        for key, points in numbers.values.items():
            if not _QUANTILE.fullmatch(key) and key != "samples":
                first, last = points[0], points[-1]
                row[key] = {"first": first[1], "at_step": first[0], "last": last[1], "last_step": last[0]}
        summaries.append(row)
    return summaries


def panels(lines: Sequence[Mapping[str, Any]], marks: Sequence[float] = ()) -> Iterator[str]:
    """Yield panels for every set: the loss at each quantile, its mean, and the distance of pictures, over training.

    marks: steps at which the run was resumed.
    """
    for numbers in by_set(lines):
        title = f"{numbers.name}, {numbers.last('samples') or 0:g} records"

        # --- the loss, by the raw weights and by their average
        means = [numbers.curve("loss", "raw weights")]
        if EMA + "loss" in numbers.values:
            means.append(numbers.curve(EMA + "loss", "averaged weights", "c2"))
        if "loss" in numbers.values:
            yield panel(line_chart(means, x_label="step", marks=marks), f"{title}: mean loss over nine quantiles")
        yield from _at_quantiles(numbers, "loss", title, marks)

        # --- what a family measures beside it
        for key in sorted(numbers.values):
            if key in ("loss", "samples") or key.startswith((KID, EMA)) or _QUANTILE.fullmatch(key):
                continue
            curves = [numbers.curve(key, key.replace("_", " "))]
            if EMA + key in numbers.values:
                curves.append(numbers.curve(EMA + key, "averaged weights", "c2"))
            yield panel(line_chart(curves, x_label="step", marks=marks), f"{title}: {key.replace('_', ' ')}")
            if numbers.values[key] != numbers.values.get("loss"):  # where it is all of the loss it is up there already
                yield from _at_quantiles(numbers, key, title, marks)

        # --- the distance of drawn pictures
        for key, what in KIDS.items():
            if key in numbers.values:
                yield panel(_kid(numbers, key, marks), f"{title}: {what}")


def _at_quantiles(numbers: SetLines, key: str, title: str, marks: Sequence[float]) -> Iterator[str]:
    """Yield panels with a curve for each quantile, of averaged weights and of those as trained."""
    for prefix, whose in ((EMA, "averaged weights"), ("", "raw weights")):
        quantiles = numbers.quantiles(prefix + key)
        # one ramp from little noise to much, so that the order is seen; each named where it ends
        widest = max(len(quantiles) - 1, 1)
        curves = [
            numbers.curve(f"{prefix}{key}{QUANTILE}{q}", q.rstrip("0"), "ramp", i / widest)
            for i, q in enumerate(quantiles)
        ]
        if curves:
            chart = line_chart(curves, x_label="step", marks=marks, ends=True)
            yield panel(chart, f"{title}: {key.replace('_', ' ')} at each quantile of the noise, {whose}")


def _kid(numbers: SetLines, key: str, marks: Sequence[float]) -> str:
    """Draw the distance with its standard error around it, and beside it what the VAE costs alone."""
    errors = dict(numbers.values.get(key + ERROR, []))
    spread = [(step, mean, errors.get(step)) for step, mean in numbers.values[key] if mean is not None]
    known = [(step, mean, error) for step, mean, error in spread if error is not None]
    curves = [numbers.curve(key, "KID-efflite0")]
    for sign, by in (("+", 1), ("−", -1)):
        bound = [mean + by * error for _, mean, error in known]
        curves.append(Curve(f"{sign} one standard error", [step for step, *_ in known], bound, "faint"))
    if key + VAE_ALONE in numbers.values:
        curves.append(numbers.curve(key + VAE_ALONE, "held-out images through the VAE only", "c2"))
    table = rows([{"step": s, "KID": m, "standard error": "–" if e is None else fixed(e, 3)} for s, m, e in spread])
    return line_chart(curves, x_label="step", marks=marks) + details("in numbers", table)
