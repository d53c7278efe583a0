"""A report from whatever a run has left in its folder: while it runs, after it was killed, after an error.

The run itself writes report.json after its saves and every few minutes (train/reporting.py), so most of what only a
process knows is there; steps, losses, evaluations and sessions are read anew from their files.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from difftrain.config.schema.sections import TrainConfig
from difftrain.report import environment
from difftrain.report.facts import DEFINITIONS, LABEL, network_of, not_enabled, published
from difftrain.report.report import case_name, losses_of, rejected_in, write_report
from difftrain.report.run_files import RunFiles, nested, read_run
from difftrain.report.run_page import build_html
from difftrain.report.sessions import FINISHED, RUNNING, history


def rebuild(folder: Path) -> Path:
    """Write report.html, and report.json where no process is about to write its own; return the page's path.

    Raises: DataFault where the folder is none of a run. OSError where it cannot be written to.
    """
    run = read_run(folder, begun=True)
    report = report_of_files(run)
    if report["status"] != RUNNING or not run.report:
        write_report(folder, report)
    return build_html(folder, report)


def report_of_files(run: RunFiles) -> dict[str, Any]:
    """Return a report of what the files of a run say; what nobody knows is absent, or None."""
    status, error = run.status
    known: dict[str, Any] = {
        **_configured(run),
        **run.report,
        "finished": status == FINISHED,
        "status": status,
        "last_error": error,
        "sessions": history(run.sessions) or run.report.get("sessions", []),
    }
    if run.is_report_current and run.report.get("status") == status:
        return known  # the run's own last word

    # --- what has come since, by the files
    last = run.steps[run.last_step] if run.steps else None
    session = run.sessions[-1] if run.sessions else {}
    measured = {key: value for key, value in run.figures().items() if value is not None}
    known |= {
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "steps": max(run.last_step, run.report_step),
        **losses_of(run.folder),
        **measured,
        "rejected": rejected_in(run.folder),
    }
    known |= {
        key: session[name]
        for key, name in (("command", "command"), ("planned_steps", "planned_steps"), ("world_size", "world_size"))
        if session.get(name)
    }
    if last is not None and not run.is_report_current:
        known |= {"samples_seen": last.samples_seen, "epochs": last.epoch, "skipped_steps": last.skipped}
    notes = known.get("notes")
    known["notes"] = {**(notes if isinstance(notes, dict) else {}), "report": list(run.notes)}
    return known


def _configured(run: RunFiles) -> dict[str, Any]:
    """Return what the configuration says, where it is known and can be read."""
    sections = nested(run.config)

    # --- what needs no valid configuration
    table: dict[str, Any] = {
        "config": environment.redacted(sections),
        "seed": run.seed,
        "precision": run.config.get("training.mixed_precision", "no"),
        "global_batch": run.global_batch,
        "device": {"kind": run.device_name},
        "planned_steps": run.record.get("total_steps"),
        "verdict": "no target was set for this run",
        "definitions": DEFINITIONS,
    }

    # --- what does
    try:
        cfg = TrainConfig.model_validate(sections)
    except ValidationError:  # of another version, or damaged
        return table
    network, world_size = network_of(cfg), run.world_size or 1
    return table | {
        "network": network,
        "case_name": case_name(
            network,
            max(cfg.batch_sizes),
            world_size,
            performance=cfg.training.performance,
            max_epochs=cfg.training.max_epochs,
        ),
        "batch_size": max(cfg.batch_sizes),
        "accumulation": cfg.training.accumulation,
        "not_enabled": not_enabled(cfg),
        "published_baselines": {"label": LABEL, "rows": [row._asdict() for row in published(cfg.model.family)]},
    }
