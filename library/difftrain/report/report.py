"""report.json: everything that an outsider needs to believe a run's numbers and to make them again; CaseName.log.

While a run goes on its report is of the steps so far (status "running"); rebuild.py makes one of the files alone.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.io.files import write_text
from difftrain.report import environment, evaluations
from difftrain.report.facts import DEFINITIONS, LABEL, not_enabled, published
from difftrain.report.line import fixed
from difftrain.report.metrics import EVALUATION, METRICS, VALIDATION, number, read_lines, step_records
from difftrain.report.peaks import vendor_peak
from difftrain.report.sessions import history, read_sessions, status_of

if TYPE_CHECKING:
    from difftrain.config import TrainConfig
    from difftrain.report.clock import Account

REPORT = "report.json"
REJECTED = "rejected.jsonl"
LOSS_WINDOW = 100
ACCURACY_EPOCHS = 120  # fewer, and the run says something of speed only
NAMED_REJECTS = 50  # the page names so many; rejected.jsonl has them all


@dataclass(frozen=True)
class ScoreTarget:
    """A figure that the run set out to reach."""

    name: str
    value: float
    limit: float
    at_least: bool = True  # else at most

    @property
    def met(self) -> bool:
        """Tell whether it was reached; a figure that is no number never is."""
        if not math.isfinite(self.value):
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def record(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        sign = ">=" if self.at_least else "<="
        return {"name": self.name, "value": self.value, "target": f"{sign} {self.limit:g}", "met": self.met}


@dataclass
class ReportFacts:
    """What only the loop knows at the end of a session; the rest is read from the run's folder.

    device: Device.describe(). dataset: name, count, fingerprint, buckets, ... as data/ sums it up. weights: where they
    came from. flops_per_sample: at the main resolution, from the family's formula. matmul_flops: measured on one card.
    """

    run_dir: Path
    network: str
    argv: list[str]
    device: dict[str, Any]
    world_size: int
    global_batch: int
    steps: int
    planned_steps: int
    epochs: int
    samples_seen: int
    account: Account  # Clock.total()
    session: Account  # Clock.session()
    dataset: dict[str, Any]
    weights: str
    peak_memory_gib: float
    attention: str = ""
    kernels: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    parameters: dict[str, int] = field(default_factory=dict)
    flops_per_sample: float | None = None
    matmul_flops: float | None = None
    quantile_losses: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, Any] = field(default_factory=dict)
    targets: list[ScoreTarget] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    timed_images: int | None = None  # of the step of logging.timed_step; None: a global batch


def make_report(cfg: TrainConfig, facts: ReportFacts) -> dict[str, Any]:
    """Return the whole report as plain data."""
    return {
        **_identity(cfg, facts),
        **_speed(cfg, facts),
        **losses_of(facts.run_dir),
        **_timed_step(cfg, facts),
        "skipped_steps": facts.skipped,
        "quantile_losses": facts.quantile_losses,
        "scores": facts.scores,
        **_verdict([*facts.targets, *_loss_target(cfg, facts)]),
        "dataset": facts.dataset,
        "rejected": rejected_in(facts.run_dir),
        "not_enabled": not_enabled(cfg),
        **_standing(facts.run_dir),
        "versions": environment.versions(facts.device),
        "config": environment.redacted(cfg.model_dump(mode="json")),
        "definitions": DEFINITIONS,
        "published_baselines": {"label": LABEL, "rows": [row._asdict() for row in published(cfg.model.family)]},
        "notes": facts.notes,
    }


def write_report(run_dir: Path, report: dict[str, Any]) -> Path:
    """Write report.json whole; NaN, which JSON does not have, as null."""
    return write_text(run_dir / REPORT, json.dumps(_plain(report), indent=1, ensure_ascii=False) + "\n")


def _identity(cfg: TrainConfig, facts: ReportFacts) -> dict[str, Any]:
    training = cfg.training
    return {
        "network": facts.network,
        "case_name": case_name(
            facts.network,
            max(cfg.batch_sizes),
            facts.world_size,
            performance=training.performance,
            max_epochs=training.max_epochs,
        ),
        "finished": facts.steps >= facts.planned_steps,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": environment.command(facts.argv),
        "code_version": environment.code_version(),
        "machine": facts.device.get("host") or {},
        "device": {key: value for key, value in facts.device.items() if key != "host"},
        # what was trained, and how
        "attention": facts.attention,
        "kernels": facts.kernels,
        "weights": environment.redact(facts.weights),
        "parameters": facts.parameters,
        "seed": training.seed,
        "precision": training.mixed_precision,
        "world_size": facts.world_size,
        "batch_size": max(cfg.batch_sizes),  # of data sets with several, the largest
        "accumulation": training.accumulation,
        "global_batch": facts.global_batch,
        # how far it came
        "steps": facts.steps,
        "planned_steps": facts.planned_steps,
        "epochs": facts.epochs,
        "samples_seen": facts.samples_seen,
    }


def _speed(cfg: TrainConfig, facts: ReportFacts) -> dict[str, Any]:
    span = facts.account.measured
    flops = span.flops / span.wall_s / facts.world_size if span.wall_s > 0 else 0.0
    peak = vendor_peak(str(facts.device.get("name", "")), cfg.training.mixed_precision)
    earlier = read_sessions(facts.run_dir).get("sessions", [])[:-1]  # the last one is this
    return {
        "fps": span.fps,
        "compute_fps": span.compute_fps,
        "ips": span.fps / facts.world_size,
        "training_time_s": span.step_s,
        "data_wait_s": span.step_wait_s,
        "measured_steps": span.steps,
        "warmup_steps": facts.account.warmup_excluded,
        "e2e_training_time_s": sum(s["elapsed_s"] for s in earlier) + facts.session.e2e_s,
        "e2e_this_session_s": facts.session.e2e_s,
        "pauses_s": facts.account.pauses_s,
        "peak_memory_gib": facts.peak_memory_gib,
        "flops_per_sample": facts.flops_per_sample,
        "model_flops_per_s_and_card": flops or None,
        "mfu": flops / peak[0] if peak and flops else None,
        "mfu_peak": {"flops_per_s": peak[0], "source": peak[1]} if peak else None,
        "matmul_utilisation": flops / facts.matmul_flops if facts.matmul_flops and flops else None,
        "matmul_flops_per_s": facts.matmul_flops,
    }


def _standing(run_dir: Path) -> dict[str, Any]:
    """Return what the sessions say of the run: whether it runs, how it ended, and why."""
    sessions = read_sessions(run_dir).get("sessions", [])
    status, error = status_of(sessions)
    return {"status": status, "last_error": error, "sessions": history(sessions)}


def losses_of(run_dir: Path) -> dict[str, Any]:
    """Return what the lines of a run's folder say of its loss: of training, and on evaluation sets."""
    lines = [line for line in step_records(run_dir / METRICS) if line["step_loss"] is not None]
    window = [float(line["step_loss"]) for line in lines[-LOSS_WINDOW:]]
    return {
        "final_loss": window[-1] if window else None,
        "final_avr_loss": lines[-1].get("avr_loss") if lines else None,
        "loss_mean": statistics.fmean(window) if window else None,
        "loss_std": statistics.stdev(window) if len(window) > 1 else None,
        "loss_window": len(window),
        "validation": list(measurements(run_dir / VALIDATION)),
        "evaluation": (evaluation := list(measurements(run_dir / EVALUATION))),
        "evaluation_summary": evaluations.summary(evaluation),
    }


def measurements(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of measurements that say of which step they are."""
    return (line for line in read_lines(path) if number(line.get("step")) is not None)


def _timed_step(cfg: TrainConfig, facts: ReportFacts) -> dict[str, Any]:
    """Return the time of one named step, and the losses of all steps: what published logs state."""
    number = cfg.logging.timed_step
    if number is None:
        return {}
    lines = list(read_lines(facts.run_dir / METRICS))
    step_s = next((line.get("step_s") for line in lines if line.get("step") == number), None)
    losses = [float(line["step_loss"]) for line in lines if isinstance(line.get("step_loss"), float | int)]
    return {
        "timed_step": number,
        "timed_step_s": step_s,
        "timed_step_ips": (facts.timed_images or facts.global_batch) / step_s / facts.world_size if step_s else None,
        "all_steps_loss_mean": statistics.fmean(losses) if losses else None,
        "all_steps_loss_std": statistics.stdev(losses) if len(losses) > 1 else None,
    }


def _loss_target(cfg: TrainConfig, facts: ReportFacts) -> list[ScoreTarget]:
    """Return what the loss of the last step was to be below; a run that has not come to it has nothing to judge yet."""
    limit = cfg.logging.loss_target
    if limit is None or facts.steps < facts.planned_steps:
        return []
    loss = losses_of(facts.run_dir)["final_loss"]
    return [ScoreTarget(f"loss at step {facts.steps}", math.nan if loss is None else loss, limit, at_least=False)]


def _verdict(targets: list[ScoreTarget]) -> dict[str, Any]:
    if not targets:
        return {"targets": [], "verdict": "no target was set for this run"}
    missed = [target.name for target in targets if not target.met]
    verdict = f"missed: {', '.join(missed)}" if missed else f"all {len(targets)} targets met"
    return {"targets": [target.record() for target in targets], "verdict": verdict}


def rejected_in(run_dir: Path) -> dict[str, Any]:
    """Sum up rejected.jsonl: how many of each reason, and the first few by name."""
    reasons = Counter[str]()
    named: list[dict[str, Any]] = []
    for item in read_lines(run_dir / REJECTED):
        reasons[str(item.get("reason", "")).split(":")[0]] += 1
        if len(named) < NAMED_REJECTS:
            named.append({"path": item.get("path", ""), "reason": item.get("reason", "")})
    return {"count": reasons.total(), "reasons": dict(reasons.most_common()), "first": named}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


# --- `${CaseName}.log` and the closing lines, as Ascend's ModelZoo and the scripts around it read them


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
