"""A comparison as lines for people, and as plain data for scripts: what `difftrain compare` prints and writes as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from difftrain.report.compare.comparison import Divergence, RunComparison, RunDifference, first_without_loss
from difftrain.report.facts import LABEL, published
from difftrain.report.line import fixed
from difftrain.report.run_files import FIGURES, RunFiles

Unreadable = tuple[str, str]  # the folder of a run as it was given, and what is wrong with it
EFFECTS = {
    "losses": "another computation",
    "rounding": "rounding",
    "length": "length of the run",
    "none": "",
}
WIDTH = 30


def labels(count: int) -> list[str]:
    """Name runs A to Z, then R27 and on."""
    return [chr(ord("A") + at) if at < 26 else f"R{at + 1}" for at in range(count)]


def shown(value: float | None, significant: int = 4) -> str:
    """Write a figure in fixed-point; a dash where there is none."""
    return "–" if value is None else fixed(float(value), significant)


# ---------------------------------------------------------------------- lines for people


def summary(names: dict[str, RunFiles | Unreadable], comparisons: dict[str, RunComparison]) -> Iterator[str]:
    """Yield the lines of standard output. names: by label, the first is what others are compared with."""
    for label, run in names.items():
        if isinstance(run, tuple):
            yield f"{label}  not comparable: {run[1]}"
            continue
        yield f"{label}  {run.folder}: {about(run)}"
        yield from (f"   {note}" for note in run.notes)
    runs = {label: run for label, run in names.items() if not isinstance(run, tuple)}
    yield ""
    yield from _table(runs, comparisons)
    for label, comparison in comparisons.items():
        yield ""
        yield from _pair(f"{label} against {next(iter(names))}", comparison)


def about(run: RunFiles) -> str:
    """Say in a line what a run is."""
    network = run.report.get("network") or run.config.get("model.family") or "unknown network"
    planned = run.report.get("planned_steps") if run.is_report_current else None
    steps = f"{run.last_step} of {planned} steps" if planned else f"{run.last_step} steps"
    cards = f"{run.world_size or '?'} x {run.device_name}"
    return f"{network}, {steps}, {run.precision}, {cards}, {run.state}"


def _table(runs: dict[str, RunFiles], comparisons: dict[str, RunComparison]) -> Iterator[str]:
    """Yield speeds and memory, a line each, and their ratios over the first run's."""
    first = next(iter(runs))
    figures = {label: run.figures() for label, run in runs.items()}
    ratios = {f"{label} / {first}": comparison.ratios() for label, comparison in comparisons.items()}
    yield " " * WIDTH + "".join(f"  {head:>12}" for head in (*figures, *ratios))
    for key, name in FIGURES.items():
        values = [column[key] for column in (*figures.values(), *ratios.values())]
        if any(value is not None for value in values):
            yield f"{name:<{WIDTH}}" + "".join(f"  {shown(value):>12}" for value in values)


def _pair(title: str, comparison: RunComparison) -> Iterator[str]:
    errors = comparison.errors
    if errors is None:
        yield f"{title}: cannot be compared step by step"
        yield from (f"  {reason}" for reason in comparison.reasons)
    else:
        steps = errors.steps
        yield f"{title}: {len(steps)} common steps, {steps[0]} to {steps[-1]}"
    for check in comparison.checks:
        sign = ">=" if check.at_least else "<="
        yield f"  {'kept  ' if check.met else 'MISSED'} {check.name} {shown(check.value)} {sign} {shown(check.limit)}"
    if errors is not None:
        yield f"  mean signed error {shown(errors.signed)}"
    for letter, run in (("the first run", comparison.a), ("the other", comparison.b)):
        if (step := first_without_loss(run)) is not None:
            yield f"  the loss of {letter} is not finite at step {step}"
    yield from (f"  {line}" for line in _differences(comparison.differences))
    yield f"  verdict: {verdict(comparison)}"


def _differences(differences: Sequence[RunDifference]) -> Iterator[str]:
    """Yield what bears on the losses and what the runs ran on; of settings of no effect on them the names."""
    quiet = [row.name for row in differences if row.group == "configuration" and row.effect == "none"]
    for row in differences:
        if row.group == "configuration" and row.effect == "none":
            continue
        group = "" if row.group in ("configuration", "run") else f"{row.group} "
        effect = f" ({EFFECTS[row.effect]})" if EFFECTS[row.effect] else ""
        nothing = "unset" if row.group == "configuration" else "none"
        yield f"differs: {group}{row.name}: {brief(row.a, nothing)} | {brief(row.b, nothing)}{effect}"
    if quiet:
        yield f"differs, with no effect on a step's loss beyond rounding: {', '.join(quiet)}"


def brief(value: Any, nothing: str) -> str:
    """Write a value in at most a line. nothing: in place of None."""
    text = nothing if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def verdict(comparison: RunComparison) -> str:
    """Say in a line whether two runs agree, and where they part."""
    if comparison.reasons:
        return f"not comparable: {comparison.reasons[0]}"
    if comparison.divergence is not None:
        return f"differ at step {comparison.divergence.step}: {parting(comparison.divergence)}"
    missed = ", ".join(check.name for check in comparison.checks if not check.met)
    compared = len(comparison.errors.steps) if comparison.errors is not None else 0
    of = max(len(comparison.a.steps), len(comparison.b.steps))
    outcome = f"missed: {missed}" if missed else "agree"
    return f"{outcome} ({compared} of {of} steps compared)"


def parting(at: Divergence) -> str:
    """Say in what two runs part."""
    limit = f"relative error {shown(at.error, 3)}, limit {shown(at.limit, 3)}"
    if at.what == "mean_relative_error":
        return f"from here on the mean error of the losses exceeds its limit: {limit}"
    return f"{at.what} {shown(at.a, 6)} and {shown(at.b, 6)}, {limit}"


# ---------------------------------------------------------------------- plain data


def document(
    names: dict[str, RunFiles | Unreadable], comparisons: dict[str, RunComparison], exit_code: int
) -> dict[str, Any]:
    """Return all of it as JSON has it; what is no finite number is null."""
    first = next(iter(names))
    return _finite(
        {
            "exit_code": exit_code,
            "runs": {label: _run(run) for label, run in names.items()},
            "comparisons": [
                {"run": label, "against": first, **_comparison(comparison)} for label, comparison in comparisons.items()
            ],
            "published_baselines": {"label": LABEL, "rows": [row._asdict() for row in baselines(names)]},
        }
    )


def baselines(names: dict[str, RunFiles | Unreadable]) -> list[Any]:
    """Return what others have published, of the runs' families first."""
    families = {str(run.config.get("model.family", "")) for run in names.values() if not isinstance(run, tuple)}
    return published(next(iter(families)) if len(families) == 1 else "")


def _run(run: RunFiles | Unreadable) -> dict[str, Any]:
    if isinstance(run, tuple):
        return {"folder": run[0], "fault": run[1]}
    return {
        "folder": str(run.folder),
        "state": run.state,
        "last_step": run.last_step,
        "lines": len(run.steps),
        "precision": run.precision,
        "device": run.device_name,
        "world_size": run.world_size or None,
        "seed": run.seed,
        "global_batch": run.global_batch,
        "plan_digests": sorted(run.plan_digests),
        "data_fingerprint": run.fingerprint or None,
        "figures": run.figures(),
        "figures_from": "report.json" if run.is_report_current else "metrics.jsonl",
        "sessions": len(run.sessions),
        "first_step_without_loss": first_without_loss(run),
        "notes": list(run.notes),
    }


def _comparison(comparison: RunComparison) -> dict[str, Any]:
    return {
        "verdict": comparison.verdict,
        "reasons": list(comparison.reasons),
        "first_divergence": asdict(comparison.divergence) if comparison.divergence else None,
        "thresholds": comparison.thresholds.model_dump(),
        "checks": [check.record() for check in comparison.checks],
        "ratios": comparison.ratios(),
        "mean_relative_error": comparison.errors.mean if comparison.errors else None,
        "errors": asdict(comparison.errors) if comparison.errors else None,
        "differences": [asdict(difference) for difference in comparison.differences],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
