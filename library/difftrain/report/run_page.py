"""report.html: one file that opens without a network, built from the files of a run alone."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

from PIL import Image

from difftrain.contracts import DataFault
from difftrain.io.files import write_text
from difftrain.report import evaluations
from difftrain.report.charts import Curve, bar_chart, line_chart
from difftrain.report.line import MEASURED, fixed
from difftrain.report.metrics import METRICS, read_lines
from difftrain.report.page import (
    bullets,
    cell,
    data_address,
    details,
    escape,
    figure,
    grid,
    jpeg_address,
    missing,
    note,
    page,
    pairs,
    panel,
    rows,
    words,
)
from difftrain.report.report import REPORT

PAGE = "report.html"
SAMPLES = "sample"  # kohya's name for it, in the output folder
MOST_BYTES = 400_000  # of a sample picture
LONGEST_SIDE = 1400


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
    return write_text(run_dir / PAGE, run_page(report, list(read_lines(run_dir / METRICS)), sample_pictures(run_dir)))


def run_page(report: dict[str, Any], lines: list[dict[str, Any]], pictures: list[Path]) -> str:
    """Return the whole page."""
    # --- beside the title: the verdict on its targets, and whether the run is at its end
    targets = report.get("targets") or []
    kind = "plain" if not targets else "good" if all(target["met"] for target in targets) else "bad"
    badges = [(kind, str(report.get("verdict", "")))]
    badges += [] if report.get("finished", True) else [("bad", "not finished")]

    # --- below it
    device, precision = report.get("device") or {}, report.get("precision", "no")
    about = [
        f"{cell(report.get('steps'))} of {cell(report.get('planned_steps'))} steps",
        f"{cell(report.get('world_size'))} x {escape(device.get('name', device.get('kind', 'device')))}",
        f"global batch {cell(report.get('global_batch'))}",
        "fp32" if precision == "no" else escape(f"mixed precision {precision}"),
        escape(report.get("written", "")),
    ]
    sections = (
        ("curves", "Curves", _curves(report, lines)),
        ("samples", "Samples", _samples(pictures)),
        ("scores", "Scores, targets and verdict", _scores(report)),
        ("evaluation", "Evaluation", _evaluation(report)),
        ("speed", "Speed", _speed(report)),
        ("data", "Data", _data(report)),
        ("repeat", "How to repeat it", _repeat(report)),
        ("sessions", "Sessions", panel(rows(report.get("sessions", [])))),
        ("definitions", "What the words mean", _definitions(report)),
        ("comparison", "For comparison", _baselines(report)),
    )
    title = str(report.get("case_name") or "training run")
    return page(title, badges=badges, about=" · ".join(about), cards=_cards(report), sections=sections)


def _resumed_at(report: dict[str, Any]) -> list[int]:
    return [session["from_step"] for session in report.get("sessions", []) if session.get("from_step")]


def _cards(report: dict[str, Any]) -> list[tuple[str, str]]:
    spread = "" if report.get("loss_std") is None else f" (± {fixed(report['loss_std'], 2)})"
    cards = [
        ("FPS, waiting included", _short(report.get("fps"))),
        ("compute FPS", _short(report.get("compute_fps"))),
        ("final loss", _short(report.get("final_loss"), 5)),
        (f"mean loss of the last {report.get('loss_window', 0)} lines{spread}", _short(report.get("loss_mean"))),
        ("seconds per step", _short(report.get("training_time_s"))),
        ("peak memory, GiB a card", _short(report.get("peak_memory_gib"))),
        ("end to end", _duration(report.get("e2e_training_time_s"))),
    ]
    for key, text in (("mfu", "MFU"), ("matmul_utilisation", "matmul utilisation")):
        if report.get(key) is not None:
            cards.append((text, f"{100 * report[key]:.1f} %"))
    return cards


def _short(value: Any, significant: int = 4) -> str:
    return "–" if value is None else fixed(float(value), significant)


def _duration(seconds: Any) -> str:
    if seconds is None:
        return "–"
    hours, minutes = int(seconds) // 3600, int(seconds) // 60 % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {int(seconds) % 60:02d} s" if minutes else f"{seconds:.1f} s"


# --- curves over the steps


def _curves(report: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    steps = [line.get("step", 0) for line in lines]
    resumed = _resumed_at(report)

    def curve(label: str, key: str, style: str = "c1") -> Curve:
        return Curve(label, steps, [line.get(key) for line in lines], style)

    # --- what every run records; of each chart whether its y axis begins at zero
    speed = [
        curve("FPS of each line", "fps", "faint"),
        _running_mean(curve("FPS", "fps")),
        _running_mean(curve("compute FPS", "compute_fps", "c2")),
    ]
    charts = [
        ("Loss", [curve("step loss", "step_loss", "faint"), curve("averaged loss", "avr_loss")], False),
        ("Images per second", speed, True),
        ("Gradient norm, before clipping", [curve("gradient norm", "grad_norm")], True),
        ("Peak memory, GiB", [curve("peak memory", "peak_memory_gib")], True),
        ("Learning rate", _rates(lines, steps), True),
        ("Waiting for data, seconds a step", [curve("data wait", "data_wait_s")], True),
    ]

    # --- what some do: the loss on held-out records, and what a family measures beside its loss, at times
    validation = report.get("validation") or []
    held_out = Curve("validation loss", [v["step"] for v in validation], [v.get("loss") for v in validation], "c2")
    if held_out.points():
        charts.insert(1, ("Validation loss", [curve("averaged training loss", "avr_loss", "faint"), held_out], False))
    for key in dict.fromkeys(key for line in lines for key in line if key.startswith(MEASURED)):
        label = key.removeprefix(MEASURED).replace("_", " ")
        measured = [curve("each line's step", key, "faint"), _running_mean(curve(label, key))]
        charts.append((label.capitalize(), measured, False))

    drawn = [(title, line_chart(curves, x_label="step", marks=resumed, zero=zero)) for title, curves, zero in charts]
    return grid(*(panel(chart, title) for title, chart in drawn)) + (
        note("Dashed lines: the run was resumed there.") if resumed else ""
    )


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


# --- pictures


def sample_pictures(run_dir: Path, most: int = 4) -> list[Path]:
    """Return the newest sample pictures, oldest first, with the very first one among them to see the progress.

    Where a step has a grid of all prompts, only grids are taken.
    """
    paths = sorted((run_dir / SAMPLES).glob("*.png"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    paths = [path for path in paths if path.stem.endswith("_grid")] or paths
    return paths if len(paths) <= most else [paths[0], *paths[1 - most :]]


def _samples(pictures: list[Path]) -> str:
    images = [f'<img src="{_address(path)}" alt="samples {escape(path.stem)}">' for path in pictures]
    return grid(*(figure(image, path.name, "panel") for image, path in zip(images, pictures)))


def _address(path: Path) -> str:
    """Return a picture as a data address: the PNG itself where it is small, else a JPEG of bounded size."""
    raw = path.read_bytes()
    with Image.open(io.BytesIO(raw)) as picture:
        if len(raw) <= MOST_BYTES and max(picture.size) <= LONGEST_SIDE:
            return data_address(raw, "png")
        return jpeg_address(picture.convert("RGB"), [(LONGEST_SIDE, quality) for quality in (88, 75, 60)], MOST_BYTES)


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
        parts += [panel(chart, "Loss at fixed timesteps"), panel(rows(quantiles), "The same in numbers")]
    if validation := report.get("validation") or []:
        parts.append(panel(rows(validation[-12:]), "Validation on held-out records"))
    if measured := report.get("evaluation"):
        parts += evaluations.panels(measured, _resumed_at(report))
    return grid(*parts)


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
    pauses = report.get("pauses_s") or {}
    beside = panel(pairs(pauses) if pauses else missing("none"), "Pauses, seconds (in no speed figure)")
    beside += panel(bullets(report.get("not_enabled") or [], otherwise="nothing"), "What is not enabled")
    return grid(panel(pairs(figures)), f'<div class="stack">{beside}</div>')


def _data(report: dict[str, Any]) -> str:
    dataset = dict(report.get("dataset") or {})
    tables = {
        key: value for key, value in dataset.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    plain = {key: value for key, value in dataset.items() if key not in tables}
    parts = [panel(pairs(plain) if plain else missing("not described"), "Data set")]
    parts += [panel(rows(value), str(key).replace("_", " ").capitalize()) for key, value in tables.items()]
    rejected = report.get("rejected") or {}
    if rejected.get("count"):
        reasons = [{"reason": reason, "items": count} for reason, count in rejected["reasons"].items()]
        named = details(f"the first {len(rejected['first'])} by name", rows(rejected["first"]))
        parts.append(panel(rows(reasons) + named, f"Rejected: {rejected['count']} items, all in rejected.jsonl"))
    else:
        parts.append(panel(missing("nothing was rejected"), "Rejected"))
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
            panel(pairs(run), "Run"),
            panel(pairs({**(report.get("machine") or {}), **(report.get("device") or {})}), "Machine and device"),
            panel(pairs(report.get("versions") or {}), "Versions"),
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
