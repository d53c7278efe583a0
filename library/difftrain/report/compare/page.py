"""The page of a comparison: one file that opens without a network, of what a comparison found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from difftrain.report.charts import Curve, line_chart
from difftrain.report.compare.comparison import RunComparison
from difftrain.report.compare.summary import (
    EFFECTS,
    Unreadable,
    about,
    baselines,
    parting,
    shown,
    verdict,
)
from difftrain.report.facts import LABEL
from difftrain.report.page import bullets, details, escape, grid, missing, note, page, panel, rows
from difftrain.report.run_files import FIGURES, RunFiles

BADGES = {"agree": "good", "part": "bad", "missed": "bad", "not comparable": "plain"}
VERDICTS = {"agree": "agree", "part": "differ", "missed": "limit missed", "not comparable": "not comparable"}
GOLDEN_ANGLE = 137.508  # degrees: hues of any number of curves lie apart

# what there is a chart of: the line's attribute, its title, whether the axis begins at zero
CHARTS = (
    ("loss", "Loss", False),
    ("grad_norm", "Gradient norm, before clipping", True),
    ("fps", "FPS of each line", True),
    ("memory_gib", "Peak memory, GiB a device", True),
)


def comparison_page(names: dict[str, RunFiles | Unreadable], comparisons: dict[str, RunComparison]) -> str:
    """Return the whole page. names: by label, the first is what others are compared with."""
    runs = {label: run for label, run in names.items() if not isinstance(run, tuple)}
    first = next(iter(names))
    badges = [
        (BADGES[comparison.verdict], f"{label} and {first}: {comparison.verdict}")
        for label, comparison in comparisons.items()
    ]
    badges += [("bad", f"{label}: not readable") for label in names.keys() - runs.keys()]
    sections = (
        ("verdict", "Verdict", _verdicts(first, comparisons)),
        ("curves", "Curves", _curves(runs)),
        ("errors", "How far they differ", _errors(first, comparisons)),
        ("speed", "Speed and memory", panel(rows(_speed(first, runs, comparisons)))),
        ("differences", "What differs", _differences(first, comparisons)),
        ("runs", "The runs", _runs(names)),
        ("comparison", "For comparison", _published(names, runs)),
    )
    title = f"{' and '.join(run.folder.name or str(run.folder) for run in runs.values())}"
    lines = [f"{label}: {run.folder}, {about(run)}" for label, run in runs.items()]
    return page(
        title, badges=badges, about="<br>".join(map(escape, lines)), cards=_cards(first, comparisons), sections=sections
    )


def _cards(first: str, comparisons: dict[str, RunComparison]) -> list[tuple[str, str]]:
    cards = []
    for label, comparison in comparisons.items():
        ratios, pair = comparison.ratios(), f"{label} / {first}"
        cards += [
            (f"FPS, {pair}", shown(ratios["fps"])),
            (f"compute FPS, {pair}", shown(ratios["compute_fps"])),
            (f"peak memory, {pair}", shown(ratios["peak_memory_gib"])),
        ]
        if comparison.errors is not None:
            cards.append((f"mean relative error, {label}", shown(comparison.errors.mean, 2)))
            cards.append(
                (
                    f"first step beyond its limit, {label}",
                    str(comparison.divergence.step) if comparison.divergence else "none",
                )
            )
    return cards


def _verdicts(first: str, comparisons: dict[str, RunComparison]) -> str:
    panels = []
    for label, comparison in comparisons.items():
        body = f"<p>{escape(verdict(comparison))}</p>"
        if comparison.reasons:
            body += bullets(comparison.reasons)
        checks = [{**check.record(), "met": "yes" if check.met else "NO"} for check in comparison.checks]
        panels.append(panel(body + (rows(checks) if checks else ""), f"{label} against {first}: {comparison.verdict}"))
    return grid(*panels)


# ---------------------------------------------------------------------- curves


def _styled(at: int, count: int) -> dict[str, Any]:
    """Return the style of a run's curves: the page's two, or a hue each."""
    return {"style": ("c1", "c2")[at]} if count <= 2 else {"style": "hue", "hue": round(at * GOLDEN_ANGLE) % 360}


def _curves(runs: dict[str, RunFiles]) -> str:
    panels = []
    resumed = sorted(
        {
            step
            for run in runs.values()
            for session in run.sessions
            if isinstance(step := session.get("from_step"), int) and step
        }
    )
    for attribute, title, zero in CHARTS:
        curves = [
            Curve(
                label,
                list(run.steps),
                [getattr(line, attribute) for line in run.steps.values()],
                **_styled(at, len(runs)),
            )
            for at, (label, run) in enumerate(runs.items())
        ]
        panels.append(panel(line_chart(curves, x_label="step", marks=resumed, zero=zero), title))
    return grid(*panels) + (note("Dashed lines: a run was resumed there.") if resumed else "")


def _errors(first: str, comparisons: dict[str, RunComparison]) -> str:
    panels = []
    for label, comparison in comparisons.items():
        if (errors := comparison.errors) is None:
            continue
        ends = [errors.steps[0], errors.steps[-1]]
        marks = [comparison.divergence.step] if comparison.divergence else []

        def limit(value: float | None, ends: list[int] = ends) -> Curve:
            return Curve("limit of a step", ends, [value, value], "c2")

        loss = [
            Curve("each step", errors.steps, errors.loss, "faint"),
            Curve("running mean", errors.steps, errors.running_mean),
            limit(comparison.thresholds.step_relative_error),
        ]
        norm = [
            Curve("each step", errors.steps, errors.grad_norm),
            limit(comparison.thresholds.grad_norm_relative_error),
        ]
        for title, curves in (("Relative error of the loss", loss), ("Relative error of the gradient norm", norm)):
            chart = line_chart(curves, x_label="step", marks=marks, log=True)
            panels.append(panel(chart + _equal(curves[0]), f"{title}, {label} against {first}"))
        if comparison.divergence is not None:
            panels.append(
                panel(f"<p>{escape(parting(comparison.divergence))}</p>", f"Step {comparison.divergence.step}")
            )
    return grid(*panels)


def _equal(curve: Curve) -> str:
    """Say what a logarithmic axis has no place for."""
    equal = sum(y == 0 for y in curve.ys)
    beyond = sum(y is not None and not math.isfinite(y) for y in curve.ys)
    remarks = [f"{equal} steps are bit-identical"] if equal else []
    remarks += [f"{beyond} steps have no finite error"] if beyond else []
    return note(f"Not plotted: {', '.join(remarks)}.") if remarks else ""


# ---------------------------------------------------------------------- tables


def _speed(first: str, runs: dict[str, RunFiles], comparisons: dict[str, RunComparison]) -> list[dict[str, Any]]:
    figures = {label: run.figures() for label, run in runs.items()}
    ratios = {f"{label} / {first}": comparison.ratios() for label, comparison in comparisons.items()}
    return [
        {"figure": name} | {head: values[key] for head, values in (figures | ratios).items()}
        for key, name in FIGURES.items()
    ]


def _differences(first: str, comparisons: dict[str, RunComparison]) -> str:
    panels = []
    for label, comparison in comparisons.items():
        records = [
            {
                "what": difference.group,
                "name": difference.name,
                first: "unset" if difference.a is None else difference.a,
                label: "unset" if difference.b is None else difference.b,
                "effect on a step": EFFECTS[difference.effect],
            }
            for difference in comparison.differences
        ]
        body = rows(records) if records else missing("nothing recorded")
        panels.append(panel(body, f"{label} against {first}"))
    return f'<div class="stack">{"".join(panels)}</div>' if panels else ""


def _runs(names: dict[str, RunFiles | Unreadable]) -> str:
    panels = []
    for label, run in names.items():
        if isinstance(run, tuple):
            panels.append(panel(f"<p>{escape(run[1])}</p>", f"{label}: not readable"))
            continue
        command = f"<pre>{escape(run.report.get('command') or 'not known')}</pre>"
        notes = bullets(run.notes, otherwise="all its files are present and complete")
        sessions = details(f"{len(run.sessions)} sessions", rows(_sessions(run.sessions)))
        panels.append(panel(f"<p>{escape(about(run))}</p>{notes}{command}{sessions}", f"{label}: {run.folder}"))
    return grid(*panels)


def _sessions(sessions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = ("session", "started", "from_step", "steps_done", "elapsed_s", "outcome", "world_size", "device")
    return [{key: session.get(key, "") for key in kept} for session in sessions]


def _published(names: dict[str, RunFiles | Unreadable], runs: dict[str, RunFiles]) -> str:
    """Lay the figures that others have published beside those of these runs; each says whose it is."""
    ours = [
        {
            "source": f"{label}: {run.folder}",
            "task": f"{about(run)}, batch {run.global_batch}",
            "FPS": run.figures()["fps"],
            "compute FPS": run.figures()["compute_fps"],
        }
        for label, run in runs.items()
    ]
    theirs = [row._asdict() for row in baselines(names)]
    return grid(panel(rows(ours), "These runs"), panel(rows(theirs), f"Figures {LABEL}"))
