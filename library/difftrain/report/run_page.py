"""report.html: one file that opens without a network, built from the files of a run alone."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.contracts import DataFault
from difftrain.io.files import write_text
from difftrain.report import evaluations
from difftrain.report.charts import Curve, bar_chart, line_chart
from difftrain.report.line import MEASURED, fixed
from difftrain.report.metrics import METRICS, step_records
from difftrain.report.page import (
    bullets,
    cell,
    details,
    escape,
    grid,
    missing,
    note,
    page,
    pairs,
    panel,
    rows,
    words,
)
from difftrain.report.report import REPORT
from difftrain.report.samples import SampleImages, sample_images, samples_section

PAGE = "report.html"
REFRESH_S = 60  # of a page of a run that is going on
AXIS_POINTS = 400  # of the step's time and images; between them a chart interpolates
BADGES = {"finished": "good", "running": "busy", "stopped": "plain", "failed": "bad", "killed": "bad"}
DEFAULT_NAME = "last"  # kohya's output name of a run that was given none


def build_html(run_dir: Path, report: dict[str, Any] | None = None) -> Path:
    """Build report.html from report.json, metrics.jsonl and the sample images in a run's folder; return its path.

    report: in place of report.json. Raises DataFault where the folder holds no report.
    """
    source = run_dir / REPORT
    try:
        report = report or json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataFault(f"{source}: cannot be read ({error.strerror}); a finished or stopped run writes it") from error
    except ValueError as error:
        raise DataFault(f"{source}: is not JSON ({error})") from error
    lines = step_records(run_dir / METRICS)
    return write_text(run_dir / PAGE, run_page(report, lines, sample_images(run_dir), name=_name(report, run_dir)))


def _name(report: dict[str, Any], run_dir: Path) -> str:
    """Return what people call a run: the name of what it writes, else its folder's."""
    save = (report.get("config") or {}).get("save") or {}
    output_name = str(save.get("output_name") or "")
    return output_name if output_name and output_name != DEFAULT_NAME else run_dir.resolve().name


def run_page(report: dict[str, Any], lines: list[dict[str, Any]], images: SampleImages, *, name: str) -> str:
    """Return the whole page. lines: of metrics.jsonl. name: of the run, the title."""
    lines = [line for line in lines if isinstance(line.get("step"), int)]

    # --- beside the title: how the run ended or that it goes on, and its targets where it has some
    status, targets = _status(report), report.get("targets") or []
    badges = [(BADGES.get(status, "plain"), status)]
    if targets:
        badges.append(("good" if all(target["met"] for target in targets) else "bad", str(report.get("verdict", ""))))

    # --- below it
    device, precision = report.get("device") or {}, report.get("precision", "no")
    about = [
        escape(report.get("case_name") or ""),
        f"{cell(report.get('steps'))} of {cell(report.get('planned_steps'))} steps",
        f"{cell(report.get('world_size'))} x {escape(device.get('name', device.get('kind', 'device')))}",
        f"global batch {cell(report.get('global_batch'))}",
        "fp32" if precision == "no" else escape(f"mixed precision {precision}"),
        escape(report.get("written", "")),
    ]
    lead = f'<p class="verdict">{escape(_verdict(report, status))}</p>\n'
    if report.get("last_error"):
        lead += panel(f"<pre>{escape(report['last_error'])}</pre>", "The last error", "failure")
    sections = (
        ("samples", "Samples", samples_section(images)),
        ("curves", "Curves", _curves(report, lines)),
        ("scores", "Scores and targets", _scores(report)),
        ("evaluation", "Evaluation", _evaluation(report)),
        ("speed", "Speed", _speed(report)),
        ("data", "Dataset", _data(report)),
        ("repeat", "How to reproduce it", _repeat(report)),
        ("sessions", "Sessions", _sessions(report)),
        ("definitions", "Definitions", _definitions(report)),
        ("comparison", "Published figures", _baselines(report)),
    )
    return page(
        name,
        badges=badges,
        about=" · ".join(part for part in about if part),
        cards=_cards(report),
        sections=sections,
        lead=lead,
        refresh_s=REFRESH_S if status == "running" else 0,
    )


def _status(report: dict[str, Any]) -> str:
    """Return running, stopped, failed, finished or killed."""
    status = str(report.get("status"))
    return status if status in BADGES else "finished" if report.get("finished", True) else "stopped"


def _verdict(report: dict[str, Any], status: str) -> str:
    """Say in one line how the run went: its end, skipped steps, what it waited for data, its targets."""
    steps, planned = report.get("steps") or 0, report.get("planned_steps") or 0
    far = (
        f" at step {steps:,} of {planned:,} ({100 * steps / planned:.0f} %)" if planned and status != "finished" else ""
    )
    parts = [f"{status}{far}"]
    if (skipped := report.get("skipped_steps")) is not None:
        parts.append(f"{skipped:,} skipped step{'s'[: skipped != 1]}" if skipped else "no skipped step")
    wait, step_s = report.get("data_wait_s"), report.get("training_time_s")
    if wait is not None and step_s:
        parts.append(f"data wait {100 * wait / step_s:.0f} %")
    if rejected := (report.get("rejected") or {}).get("count"):
        parts.append(f"{rejected:,} files of the dataset rejected")
    if report.get("targets"):
        parts.append(str(report.get("verdict", "")))
    return ", ".join(parts)


def _resumed_at(report: dict[str, Any]) -> list[int]:
    return [session["from_step"] for session in report.get("sessions") or [] if session.get("from_step")]


def _sessions(report: dict[str, Any]) -> str:
    """Show the history without hashes, and without what is the same in all sessions and stands above."""
    sessions = report.get("sessions") or []
    left_out = {"global_batch", "plan_digest", "data_fingerprint"}
    left_out |= {key for key in ("command", "device", "world_size") if len({str(s.get(key)) for s in sessions}) == 1}
    kept = [{key: value for key, value in session.items() if key not in left_out} for session in sessions]
    return panel(rows([{**s, **_as_durations(s, "elapsed_s")} for s in kept])) if kept else ""


def _as_durations(record: dict[str, Any], *keys: str) -> dict[str, str]:
    return {key: _duration(record[key]) for key in keys if isinstance(record.get(key), int | float)}


def _cards(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what counts most: the loss first, smoothed; nothing that was not measured."""
    spread = "" if report.get("loss_std") is None else f" ± {fixed(report['loss_std'], 2)}"
    window = report.get("loss_window", 0)
    held_out = [line["loss"] for line in report.get("validation") or [] if line.get("loss") is not None]
    cards = [
        (f"loss, mean of the last {window} lines{spread}", _short(report.get("loss_mean"))),
        ("validation loss, the last", _short(held_out[-1] if held_out else None)),
        ("images per second (FPS), data wait included", _short(report.get("fps"))),
        ("images per second, computing only", _short(report.get("compute_fps"))),
        ("time per step", _seconds(report.get("training_time_s"))),
        ("peak memory per device", f"{value} GiB" if (value := _short(report.get("peak_memory_gib"), 3)) else ""),
        ("end to end", _duration(report.get("e2e_training_time_s"))),
    ]
    for key, text in (("mfu", "MFU"), ("matmul_utilisation", "matmul utilisation")):
        cards.append((text, _percent(report.get(key))))
    return [(text, value) for text, value in cards if value]


# --- figures with their units; nothing for what was not measured


def _short(value: Any, significant: int = 4) -> str:
    return "" if value is None else fixed(float(value), significant)


def _seconds(value: Any) -> str:
    if value is None:
        return ""
    return f"{1000 * value:.3g} ms" if value < 0.1 else f"{value:.3g} s" if value < 100 else _duration(value)


def _duration(seconds: Any) -> str:
    if seconds is None:
        return ""
    hours, minutes = int(seconds) // 3600, int(seconds) // 60 % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {int(seconds) % 60:02d} s" if minutes else f"{seconds:.1f} s"


def _percent(value: Any) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _scaled(value: Any, unit: str) -> str:
    """Write a large number with the prefix of its thousands: 1.11 GFLOP/s."""
    if not value:
        return ""
    power = min(max(int(math.log10(abs(value)) // 3), 0), 6)
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}{unit}"


# --- curves over the steps


def _curves(report: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    steps = np.array([line["step"] for line in lines], dtype=np.float64)
    resumed = _resumed_at(report)

    def curve(label: str, key: str, style: str = "c1") -> Curve:
        return Curve(label, steps, _column(lines, key), style)

    # --- what every run records; of each chart whether its y axis begins at zero
    fps = curve("FPS of each line", "fps", "faint")
    speed = [
        fps,
        _running_mean(replace(fps, name="FPS", style="c1")),
        _running_mean(curve("compute FPS", "compute_fps", "c2")),
    ]
    charts = [
        ("Loss", [curve("step loss", "step_loss", "faint"), curve("averaged loss", "avr_loss")], False),
        ("Images per second", speed, True),
        ("Gradient norm, before clipping", [curve("gradient norm", "grad_norm")], True),
        ("Peak memory, GiB", [curve("peak memory", "peak_memory_gib")], True),
        ("Learning rate", _rates(lines, steps), True),
        ("Data wait, seconds per step", [curve("data wait", "data_wait_s")], True),
    ]

    # --- what some do: the loss on held-out records, and what a family measures beside its loss, at times
    validation = report.get("validation") or []
    held_out = Curve("validation loss", [v["step"] for v in validation], [v.get("loss") for v in validation], "c2")
    if len(held_out.points()):
        charts.insert(1, ("Validation loss", [curve("averaged training loss", "avr_loss", "faint"), held_out], False))
    keys = dict.fromkeys(itertools.chain.from_iterable(lines))  # of all lines: some are measured at times only
    for key in (key for key in keys if key.startswith(MEASURED)):
        if np.array_equal(_column(lines, key), np.asarray(charts[0][1][0].ys), equal_nan=True):
            continue  # all of the loss: the first chart has it
        label = key.removeprefix(MEASURED).replace("_", " ")
        raw = curve("each line's step", key, "faint")
        measured = [raw, _running_mean(replace(raw, name=label, style="c1"))]
        charts.append((label.capitalize(), measured, False))

    kept = [chart for chart in charts if any(len(curve.points()) for curve in chart[1])]
    if not kept:
        return panel(missing("nothing was recorded"))
    drawn = [(title, line_chart(curves, x_label="step", marks=resumed, zero=zero)) for title, curves, zero in kept]
    axes = json.dumps(_axes(lines), separators=(",", ":"))
    return f'<div data-axes="{escape(axes)}">{grid(*(panel(chart, title) for title, chart in drawn))}</div>' + (
        note("Dashed lines: the run was resumed there.") if resumed else ""
    )


def _column(lines: list[dict[str, Any]], key: str) -> np.ndarray:
    """Return a key's numbers, NaN where a line has none."""
    values = [line.get(key) for line in lines]
    try:
        return np.array(values, dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        return np.array([v if isinstance(v, int | float) else math.nan for v in values], dtype=np.float64)


def _axes(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return some steps with their time, in seconds of all sessions, and the images seen, as far as lines say it."""
    elapsed, session = (np.nan_to_num(_column(lines, key)) for key in ("elapsed_s", "session"))
    starts = np.flatnonzero(np.diff(session, prepend=np.nan) != 0)  # time is counted from the beginning of each session
    times = np.zeros(len(lines))
    for first, end in zip(starts, [*starts[1:], len(lines)]):
        before = times[first - 1] if first else 0.0
        times[first:end] = before + np.maximum.accumulate(elapsed[first:end])
    seen = _column(lines, "samples_seen")
    chosen = np.unique(np.linspace(0, len(lines) - 1, min(len(lines), AXIS_POINTS)).astype(np.int64))
    axes: dict[str, list[float]] = {"step": [lines[i]["step"] for i in chosen]}
    if len(times) and times[-1] > 0:
        axes["time"] = [round(float(times[i]), 2) for i in chosen]
    if len(seen) and np.isfinite(seen).all():
        axes["images"] = [int(seen[i]) for i in chosen]
    return axes


def _running_mean(curve: Curve) -> Curve:
    """Return the mean over the last fiftieth of the run, by sums so that long runs stay quick."""
    points = curve.points()
    count = len(points)
    window = max(1, count // 50)
    sums = np.concatenate([[0.0], np.cumsum(points[:, 1])])
    ends = np.arange(1, count + 1)
    starts = np.maximum(0, ends - window)
    return Curve(
        f"{curve.name}, running mean", points[:, 0], (sums[ends] - sums[starts]) / (ends - starts), curve.style
    )


def _rates(lines: list[dict[str, Any]], steps: np.ndarray) -> list[Curve]:
    """Return a curve for the first group, and one for the text encoders where they have rates of their own."""
    names = list((lines[-1].get("lrs") or {}) if lines else {})
    if len(names) < 2:
        return [Curve("first group", steps, _column(lines, "lr"))]
    groups = [line.get("lrs") or {} for line in lines]
    return [
        Curve(label, steps, _column(groups, label), style) for label, style in zip((names[0], names[-1]), ("c1", "c2"))
    ]


# --- tables


def _scores(report: dict[str, Any]) -> str:
    targets = [{**target, "met": "yes" if target["met"] else "NO"} for target in report.get("targets") or []]
    return grid(
        panel(rows(targets), "Targets") if targets else "",
        panel(pairs(report["scores"]), "Scores") if report.get("scores") else "",
    )


def _evaluation(report: dict[str, Any]) -> str:
    parts = []
    if quantiles := report.get("quantile_losses") or []:
        chart = bar_chart(
            [f"{q['quantile']:g}" for q in quantiles],
            [float(q["loss"]) if q.get("loss") is not None else float("nan") for q in quantiles],
            x_label="quantile of the timestep",
        )
        parts.append(panel(chart + details("in numbers", rows(quantiles)), "Loss at fixed timesteps"))
    if validation := report.get("validation") or []:
        parts.append(panel(rows(validation[-12:]), "Validation on held-out images"))
    if measured := report.get("evaluation"):
        parts += evaluations.panels(measured, _resumed_at(report))
    return grid(*parts)


def _speed(report: dict[str, Any]) -> str:
    def get(key: str) -> Any:
        return report.get(key)

    peak = get("mfu_peak") or {}
    figures = {
        "images per second (FPS), data wait included": _short(get("fps")),
        "images per second, computing only (compute FPS)": _short(get("compute_fps")),
        "images per second and device (IPS)": _short(get("ips")),
        "time per step": _seconds(get("training_time_s")),
        "data wait per step": _seconds(get("data_wait_s")),
        "steps measured": cell(get("measured_steps")) if get("measured_steps") is not None else "",
        "warm-up steps, left out": cell(get("warmup_steps")) if get("warmup_steps") is not None else "",
        "steps skipped": cell(get("skipped_steps")) if get("skipped_steps") is not None else "",
        "end to end": _duration(get("e2e_training_time_s")),
        "end to end, this session": _duration(get("e2e_this_session_s")),
        f"time of step {get('timed_step')}": _seconds(get("timed_step_s")),
        f"IPS of step {get('timed_step')}": _short(get("timed_step_ips")),
        "peak memory per device": f"{_short(get('peak_memory_gib'))} GiB" if get("peak_memory_gib") else "",
        "model work per image": _scaled(get("flops_per_sample"), "FLOP"),
        "model work per device": _scaled(get("model_flops_per_s_and_card"), "FLOP/s"),
        "matrix multiplication measured": _scaled(get("matmul_flops_per_s"), "FLOP/s"),
        "share of that (matmul utilisation)": _percent(get("matmul_utilisation")),
        "vendor's peak": _scaled(peak.get("flops_per_s"), "FLOP/s"),
        "share of the peak (MFU)": _percent(get("mfu")) or "no vendor peak is known for this device and precision",
    }
    table = "".join(f"<tr><th>{escape(key)}</th><td>{value}</td></tr>" for key, value in figures.items() if value)
    body = f'<table class="pairs"><tbody>{table}</tbody></table>'
    body += note(f"Source of the peak: {peak['source']}") if peak.get("source") else ""
    beside = ""
    if pauses := report.get("pauses_s"):
        beside += panel(pairs({key: _duration(value) for key, value in pauses.items()}), "Pauses, excluded from speeds")
    if off := report.get("not_enabled"):
        beside += panel(bullets(off), "Not enabled")
    return grid(panel(body), f'<div class="stack">{beside}</div>' if beside else "")


def _data(report: dict[str, Any]) -> str:
    dataset = dict(report.get("dataset") or {})
    tables = {
        key: value for key, value in dataset.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    plain = {key: value for key, value in dataset.items() if key not in tables and value not in (None, "", [], {})}
    parts = [panel(pairs(plain), "In all")] if plain else []
    parts += [panel(rows(value), str(key).replace("_", " ").capitalize()) for key, value in tables.items()]
    rejected = report.get("rejected") or {}
    if rejected.get("count"):
        reasons = [{"reason": reason, "items": count} for reason, count in rejected["reasons"].items()]
        named = details(f"the first {len(rejected['first'])} by name", rows(rejected["first"]))
        parts.append(panel(rows(reasons) + named, f"Rejected: {rejected['count']} items, all in rejected.jsonl"))
    return grid(*parts)


def _repeat(report: dict[str, Any]) -> str:
    keys = ("code_version", "weights", "seed", "attention", "kernels", "parameters", "notes")
    run = {key: report.get(key) for key in keys if report.get(key) not in (None, "", {})}
    config = "".join(
        f"<h3>{words(section)}</h3>{pairs(values) if isinstance(values, dict) else cell(values)}"
        for section, values in (report.get("config") or {}).items()
    )
    parts = (
        panel(f"<pre>{escape(report.get('command', ''))}</pre>", "Command"),
        grid(
            *(
                panel(pairs(values), title)
                for title, values in (
                    ("Run", run),
                    ("Machine and device", {**(report.get("machine") or {}), **(report.get("device") or {})}),
                    ("Versions", report.get("versions") or {}),
                )
                if values
            ),
        ),
        panel(details("the resolved configuration, every key", config), "Configuration"),
    )
    return f'<div class="stack">{"".join(parts)}</div>'


def _definitions(report: dict[str, Any]) -> str:
    body = "".join(
        f"<dt>{words(word)}</dt><dd>{escape(text)}</dd>" for word, text in (report.get("definitions") or {}).items()
    )
    return panel(f"<dl>{body}</dl>") if body else ""


def _baselines(report: dict[str, Any]) -> str:
    published = report.get("published_baselines") or {}
    return panel(rows(published["rows"]), f"Figures {published.get('label', '')}") if published.get("rows") else ""
