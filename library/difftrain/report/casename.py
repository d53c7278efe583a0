"""`${CaseName}.log` and the closing lines, as Ascend's ModelZoo and the scripts around it read them."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from difftrain.io.files import write_text
from difftrain.report.line import fixed

ACCURACY_EPOCHS = 120  # fewer, and the run says something of speed only


def case_name(network: str, batch_size: int, cards: int, *, performance: bool, max_epochs: int | None) -> str:
    """Return `${Network}_bs${BatchSize}_${RankSize}p_acc`, or `_perf`. batch_size: images a card takes at once."""
    perf = performance or (max_epochs is not None and max_epochs < ACCURACY_EPOCHS)
    return f"{network}_bs{batch_size}_{cards}p_{'perf' if perf else 'acc'}"


def case_log(report: dict[str, Any]) -> str:
    """Return the log's text, from report.json alone. ActualFPS includes waiting for data."""
    rows = {
        "Network": report["network"],
        "RankSize": report["world_size"],
        "BatchSize": report["config"]["training"]["batch_size"],
        "DeviceType": platform.machine(),  # ModelZoo's `uname -m`
        "CaseName": report["case_name"],
        "ActualFPS": _number(report["fps"]),
        "TrainingTime": _number(report["training_time_s"]),
        "ActualLoss": _number(report["final_loss"]),
        "E2ETrainingTime": _number(report["e2e_training_time_s"]),
    }
    return "".join(f"{key} = {value}\n" for key, value in rows.items())


def write_case_log(run_dir: Path, report: dict[str, Any]) -> Path:
    """Write it beside report.json."""
    return write_text(run_dir / f"{report['case_name']}.log", case_log(report))


def final_lines(report: dict[str, Any]) -> list[str]:
    """Return the three lines that close standard output."""
    return [
        f"Final Performance images/sec : {_number(report['fps'])}",
        f"Final Train Loss : {_number(report['final_loss'])}",
        f"E2E Training Duration sec : {_number(report['e2e_training_time_s'])}",
    ]


def _number(value: float | None) -> str:
    return "nan" if value is None else fixed(float(value))
