"""report.html: one file that opens without a network, built from the files of a run alone."""

from __future__ import annotations

import itertools
import json
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from difftrain.contracts import DataFault
from difftrain.io.files import write_text
from difftrain.report import evaluations
from difftrain.report.html_parts import (
    Curve,
    bar_chart,
    cell,
    data_address,
    line_chart,
    name,
    pairs,
    rows,
    sample_pictures,
)
from difftrain.report.line import MEASURED, fixed
from difftrain.report.metrics import METRICS, read_lines
from difftrain.report.report import REPORT

PAGE = "report.html"


def build_html(run_dir: Path) -> Path:
    """Build report.html from report.json, metrics.jsonl and the sample pictures in a run's folder; return its path.

    Raises DataFault where the folder holds no report.
    """
    source = run_dir / REPORT
    try:
        report = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataFault(f"{source}: cannot be read ({error.strerror}); a finished or stopped run leaves it") from error
    except ValueError as error:
        raise DataFault(f"{source}: is no JSON ({error})") from error
    lines = list(read_lines(run_dir / METRICS))
    return write_text(run_dir / PAGE, page(report, lines, sample_pictures(run_dir)))


def page(report: dict[str, Any], lines: list[dict[str, Any]], pictures: list[Path]) -> str:
    """Return the whole page."""
    style = resources.files("difftrain.report").joinpath("page.css").read_text(encoding="utf-8")
    title = f"{report.get('case_name') or 'training run'}"
    sections = (
        _head(report, title),
        _cards(report),
        _section("Curves", _curves(report, lines)),
        _section("Samples", _samples(pictures)),
        _section("Scores, targets and verdict", _scores(report)),
        _section("Evaluation", _evaluation(report)),
        _section("Speed", _speed(report)),
        _section("Data", _data(report)),
        _section("How to repeat it", _repeat(report)),
        _section("Sessions", _panel(rows(report.get("sessions", [])))),
        _section("What the words mean", _definitions(report)),
        _section("For comparison", _baselines(report)),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def _panel(body: str, title: str = "") -> str:
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="panel">{heading}{body}</div>'


def _head(report: dict[str, Any], title: str) -> str:
    targets = report.get("targets") or []
    kind = "plain" if not targets else "good" if all(target["met"] for target in targets) else "bad"
    verdict = f'<span class="badge {kind}">{escape(str(report.get("verdict", "")))}</span>'
    done = "" if report.get("finished", True) else '<span class="badge bad">not finished</span>'
    device = report.get("device") or {}
    told = [
        f"{cell(report.get('steps'))} of {cell(report.get('planned_steps'))} steps",
        f"{cell(report.get('world_size'))} x {escape(str(device.get('name', device.get('kind', 'device'))))}",
        f"global batch {cell(report.get('global_batch'))}",
        escape(_precision(report)),
        escape(str(report.get("written", ""))),
    ]
    return f"<header><h1>{escape(title)}{verdict}{done}</h1><p>{' · '.join(told)}</p></header>"


def _precision(report: dict[str, Any]) -> str:
    precision = report.get("precision", "no")
    return "fp32" if precision == "no" else f"mixed precision {precision}"


def _cards(report: dict[str, Any]) -> str:
    cards = [
        ("FPS, waiting included", _short(report.get("fps"))),
        ("compute FPS", _short(report.get("compute_fps"))),
        ("final loss", _short(report.get("final_loss"), 5)),
        (_mean_of(report), _short(report.get("loss_mean"))),
        ("seconds per step", _short(report.get("training_time_s"))),
        ("peak memory, GiB a card", _short(report.get("peak_memory_gib"))),
        ("end to end", _duration(report.get("e2e_training_time_s"))),
    ]
    if report.get("mfu") is not None:
        cards.append(("MFU", f"{100 * report['mfu']:.1f} %"))
    if report.get("matmul_utilisation") is not None:
        cards.append(("matmul utilisation", f"{100 * report['matmul_utilisation']:.1f} %"))
    body = "".join(f'<div class="card"><b>{value}</b><span>{escape(text)}</span></div>' for text, value in cards)
    return f'<div class="cards">{body}</div>'


def _short(value: Any, significant: int = 4) -> str:
    return "–" if value is None else fixed(float(value), significant)


def _mean_of(report: dict[str, Any]) -> str:
    spread = "" if report.get("loss_std") is None else f" (± {fixed(report['loss_std'], 2)})"
    return f"mean loss of the last {report.get('loss_window', 0)} lines{spread}"


def _duration(seconds: Any) -> str:
    if seconds is None:
        return "–"
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {whole % 60:02d} s"
        if minutes
        else f"{seconds:.1f} s"
    )


def _curves(report: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    steps = [line.get("step", 0) for line in lines]
    resumed = [s["from_step"] for s in report.get("sessions", []) if s.get("from_step")]

    def curve(label: str, key: str, style: str = "c1") -> Curve:
        return Curve(label, steps, [line.get(key) for line in lines], style)

    validation = report.get("validation") or []
    held_out = Curve("validation loss", [v["step"] for v in validation], [v.get("loss") for v in validation], "c2")
    charts = [
        ("Loss", [curve("step loss", "step_loss", "faint"), curve("averaged loss", "avr_loss")], False),
        (
            "Images per second",
            [
                curve("FPS of each line", "fps", "faint"),
                _running_mean(curve("FPS", "fps")),
                _running_mean(curve("compute FPS", "compute_fps", "c2")),
            ],
            True,
        ),
        ("Gradient norm, before clipping", [curve("gradient norm", "grad_norm")], True),
        ("Peak memory, GiB", [curve("peak memory", "peak_memory_gib")], True),
        ("Learning rate", _rates(lines, steps), True),
        ("Waiting for data, seconds a step", [curve("data wait", "data_wait_s")], True),
    ]
    for key in dict.fromkeys(key for line in lines for key in line):  # what a family measures beside its loss, at times
        if key.startswith(MEASURED):
            label = key.removeprefix(MEASURED).replace("_", " ")
            charts.append(
                (label.capitalize(), [curve("each line's step", key, "faint"), _running_mean(curve(label, key))], False)
            )
    if held_out.points():
        charts.insert(1, ("Validation loss", [curve("averaged training loss", "avr_loss", "faint"), held_out], False))
    body = "".join(
        _panel(line_chart(curves, x_label="step", marks=resumed, zero=zero), title) for title, curves, zero in charts
    )
    note = '<p class="note">Dashed lines: the run was resumed there.</p>' if resumed else ""
    return f'<div class="grid2">{body}</div>{note}'


def _running_mean(curve: Curve) -> Curve:
    """Return the mean over the last fiftieth of the run, by sums so that long runs stay quick."""
    points = curve.points()
    window = max(1, len(points) // 50)
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    means = [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(window, i + 1) for i in range(len(points))]
    return Curve(f"{curve.name}, running mean", [x for x, _ in points], means, curve.style)


def _rates(lines: list[dict[str, Any]], steps: list[int]) -> list[Curve]:
    """Return a curve for the first group, and one for the text encoders where they have rates of their own."""
    curves = [Curve("first group", steps, [line.get("lr") for line in lines])]
    names = list((lines[-1].get("lrs") or {}) if lines else {})
    if len(names) > 1:
        curves = [
            Curve(label, steps, [(line.get("lrs") or {}).get(label) for line in lines], style)
            for label, style in zip((names[0], names[-1]), ("c1", "c2"))
        ]
    return curves


def _samples(pictures: list[Path]) -> str:
    figures = "".join(
        f'<figure class="panel"><img src="{data_address(path)}" alt="samples {escape(path.stem, quote=True)}">'
        f"<figcaption>{escape(path.name)}</figcaption></figure>"
        for path in pictures
    )
    return f'<div class="grid2">{figures}</div>' if figures else ""


def _scores(report: dict[str, Any]) -> str:
    parts = []
    targets = [{**t, "met": "yes" if t["met"] else "NO"} for t in report.get("targets") or []]
    if targets:
        parts.append(_panel(rows(targets), "Targets"))
    if report.get("scores"):
        parts.append(_panel(pairs(report["scores"]), "Scores"))
    return f'<div class="grid2">{"".join(parts)}</div>' if parts else ""


def _evaluation(report: dict[str, Any]) -> str:
    parts = []
    quantiles = report.get("quantile_losses") or []
    if quantiles:
        chart = bar_chart(
            [f"{q['quantile']:g}" for q in quantiles],
            [float(q["loss"]) if q.get("loss") is not None else float("nan") for q in quantiles],
            x_label="quantile of the timestep",
        )
        parts.append(_panel(chart, "Loss at fixed timesteps") + _panel(rows(quantiles), "The same in numbers"))
    validation = report.get("validation") or []
    if validation:
        parts.append(_panel(rows(validation[-12:]), "Validation on held-out records"))
    if measured := report.get("evaluation"):
        resumed = [s["from_step"] for s in report.get("sessions", []) if s.get("from_step")]
        parts.append(evaluations.section(measured, resumed))
    return f'<div class="grid2">{"".join(parts)}</div>' if parts else ""


def _speed(report: dict[str, Any]) -> str:
    keys = (
        "fps", "compute_fps", "ips", "training_time_s", "data_wait_s", "measured_steps", "warmup_steps",
        "e2e_training_time_s", "e2e_this_session_s", "flops_per_sample", "model_flops_per_s_and_card", "mfu", "mfu_peak",
        "matmul_utilisation", "matmul_flops_per_s", "peak_memory_gib", "skipped_steps",
    )  # fmt: skip
    figures = {key: report.get(key) for key in keys if key in report}
    if figures.get("mfu") is None:
        figures |= {"mfu": "none: no vendor's peak is known for this device and precision"}
        figures.pop("mfu_peak", None)
    pauses = {key: value for key, value in (report.get("pauses_s") or {}).items()}
    beside = _panel(pairs(pauses) if pauses else '<p class="none">none</p>', "Pauses, seconds (in no speed figure)")
    off = "".join(f"<li>{escape(text)}</li>" for text in report.get("not_enabled") or [])
    beside += _panel(f"<ul>{off}</ul>" if off else '<p class="none">nothing</p>', "What is not enabled")
    return f'<div class="grid2">{_panel(pairs(figures))}<div class="stack">{beside}</div></div>'


def _data(report: dict[str, Any]) -> str:
    dataset = dict(report.get("dataset") or {})
    tables = {
        key: value for key, value in dataset.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    plain = {key: value for key, value in dataset.items() if key not in tables}
    parts = [_panel(pairs(plain) if plain else '<p class="none">not described</p>', "Data set")]
    parts += [_panel(rows(value), str(key).replace("_", " ").capitalize()) for key, value in tables.items()]
    rejected = report.get("rejected") or {}
    if rejected.get("count"):
        reasons = [{"reason": reason, "items": count} for reason, count in rejected["reasons"].items()]
        named = (
            f"<details><summary>the first {len(rejected['first'])} by name</summary>{rows(rejected['first'])}</details>"
        )
        parts.append(_panel(rows(reasons) + named, f"Rejected: {rejected['count']} items, all in rejected.jsonl"))
    else:
        parts.append(_panel('<p class="none">nothing was rejected</p>', "Rejected"))
    return f'<div class="grid2">{"".join(parts)}</div>'


def _repeat(report: dict[str, Any]) -> str:
    what = {
        key: report.get(key)
        for key in ("code_version", "weights", "seed", "attention", "kernels", "parameters", "notes")
    }
    config = "".join(
        f"<h3>{name(section)}</h3>{pairs(values) if isinstance(values, dict) else cell(values)}"
        for section, values in (report.get("config") or {}).items()
    )
    parts = (
        _panel(f"<pre>{escape(str(report.get('command', '')))}</pre>", "Command")
        + '<div class="grid2">'
        + _panel(pairs({key: value for key, value in what.items() if value not in (None, "", {})}), "Run")
        + _panel(pairs({**(report.get("machine") or {}), **(report.get("device") or {})}), "Machine and device")
        + _panel(pairs(report.get("versions") or {}), "Versions")
        + "</div>"
        + _panel(
            f"<details><summary>the resolved configuration, every key</summary>{config}</details>", "Configuration"
        )
    )
    return f'<div class="stack">{parts}</div>'


def _definitions(report: dict[str, Any]) -> str:
    words = report.get("definitions") or {}
    return (
        _panel("<dl>" + "".join(f"<dt>{name(k)}</dt><dd>{escape(v)}</dd>" for k, v in words.items()) + "</dl>")
        if words
        else ""
    )


def _baselines(report: dict[str, Any]) -> str:
    published = report.get("published_baselines") or {}
    if not published.get("rows"):
        return ""
    return _panel(rows(published["rows"]), f"Figures {published.get('label', '')}")
